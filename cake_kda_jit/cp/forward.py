"""The forward of ``chunk_kda`` on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from ..ops.forward import Context, make_context
from ..ops.pipeline import Tiles
from ..ops.select import select_attention
from ..ops.workspace import HeadBlock
from .parts import Tensors
from .passes import EVERY_HEAD, ParallelPass, Part
from .tables import PhaseTables


class _Forward:
    """The tensors of one forward. States of a phase have a row per span, in the phase's order."""

    def __init__(self, call: ParallelPass, output_final_state: bool, keep: bool) -> None:
        self.call, self.phases = call, call.tables.forward
        inputs = call.inputs
        made = call.run_part(f"make, keep={keep}", EVERY_HEAD, partial(self._make, keep), {})
        self.o, self.heads_exit, self.B, own_M, *context = made
        self.context = Context(*context)
        self.M = self.context.M if own_M is None else own_M
        self.tensors = {"o": self.o, "B": self.B, **vars(self.context), "M": self.M}
        self.entered_entry: torch.Tensor | None = None
        self.whole_exit = self.entered_exit = None
        if output_final_state:
            self.whole_exit = call.state(self.phases.whole.size)
            self.entered_exit = call.state(self.phases.entered.size)
        self.heads_entry, self.whole_entry = (
            None if inputs.initial_state is None else inputs.initial_state.index_select(0, phase.documents)
            for phase in (self.phases.heads, self.phases.whole)
        )

    def _make(self, keep: bool, part: Part) -> Sequence:
        """o, what leaves heads, B, M where the context does not keep it, and what the context does."""
        pipeline = part.pipeline()
        if keep:
            # A target without a backward is refused here, not after the forward of a whole model.
            select_attention("chunk_grad", pipeline.inputs.problem, pipeline.family)
        # Every row of M is written.
        context = make_context(pipeline.inputs, self.call.ctx.options, keep, ("checkpoints",))
        own_M = pipeline.summaries() if context.M is None else None
        states = pipeline.inputs.empty(self.call.state_shape(self.phases.heads.size))
        return (
            pipeline.inputs.empty_rows(part.tensors["v"]),
            states,
            pipeline.summaries(),
            own_M,
            *vars(context).values(),
        )

    def steps(self, block: HeadBlock) -> Iterator[None]:
        """All of a head block; yields while its exchange is under way."""
        call, phases = self.call, self.phases
        memory = None
        if call.has_chunks:
            edges = self._edges(phases.heads, self.heads_entry, self.heads_exit)
            (memory,) = call.run_part("first", block, self._first, {"summarized": call.tables.summarized} | edges)
        finish = call.start(block, self.heads_exit, self.M, self.B)
        if call.has_chunks and phases.whole.size:
            edges = self._edges(phases.whole, self.whole_entry, self.whole_exit)
            call.run_part("whole", block, self._whole, {"memory": memory} | edges)
        entered = None
        if call.has_chunks and phases.entered.size:
            edges = self._edges(phases.entered, None, self.entered_exit)
            entered = call.prepare_part("entered", block, self._entered, {"memory": memory} | edges)
        yield
        self.entered_entry = call.filled(self.entered_entry, block, finish())
        if entered is not None:
            entered({"entry": self.entered_entry})

    def _edges(self, phase: PhaseTables, entry: torch.Tensor | None, exit_: torch.Tensor | None) -> Tensors:
        """What a part that scans a phase is given."""
        tables = {"segment_table": phase.segment_table, "summary_offsets": phase.summary_offsets}
        return self.tensors | tables | {"entry": entry, "exit": exit_}

    def _first(self, part: Part) -> Sequence:
        tiles = part.pipeline().make_tiles(part.block, **part.context.tiles(part.block))
        part.pipeline().prepare(part.block, tiles)
        part.summarize(tiles, M=part.tensors["M"], B=part.tensors["B"])
        self._scan(part, tiles, self.phases.heads)
        return (tiles.memory,)

    def _whole(self, part: Part) -> Sequence:
        self._scan(part, part.tiles(), self.phases.whole)
        return ()

    def _entered(self, part: Part) -> Sequence:
        self._scan(part, part.tiles(), self.phases.entered)
        return ()

    def _scan(self, part: Part, tiles: Tiles, phase: PhaseTables) -> None:
        if phase.size == 0:
            return
        tensors, context, entry = part.tensors, part.context, part.tensors["entry"]
        pipeline = part.pipeline(tensors["segment_table"], tensors["summary_offsets"], entry)
        segment_entry = None
        if phase.is_cut:
            segment_entry = pipeline.walk(part.block, tensors["M"], tensors["B"], entry, transpose=False)
        outputs = {
            "o": tensors["o"],
            "final_state": tensors["exit"],
            "h": context.block("h", part.block),
            "v_new": context.block("v_new", part.block),
            "checkpoints": context.checkpoints,
        }
        pipeline.scan(part.block, tiles, segment_entry, outputs, self.call.ctx.options.checkpoint_tokens)

    def final_state(self) -> torch.Tensor:
        """``[N, HV, K, V]``: rows of the documents that end here, 0 elsewhere."""
        found = self.call.state(self.call.ctx.num_documents).zero_()
        whole, entered = self.phases.whole, self.phases.entered
        if self.call.has_chunks:
            found.index_copy_(0, whole.documents, self.whole_exit)
        elif self.whole_entry is not None:  # all whole documents are empty
            found.index_copy_(0, whole.documents, self.whole_entry)
        # Inner spans come first in this phase: what leaves them is no document's final state.
        num_inner = self.call.tables.inner.size
        found.index_copy_(0, entered.documents[num_inner:], self.entered_exit[num_inner:])
        return found


def parallel_forward(
    call: ParallelPass, *, output_final_state: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, Context]:
    """Return o of the rank's tokens, the final states of the documents that end here, and what the backward needs."""
    forward = _Forward(call, output_final_state, keep)
    # Ranks cut heads alike whether or not their own tensors ask for a gradient: all tiles count as scratch.
    call.run(forward.steps, states=0, values=0, kept=())
    return forward.o, forward.final_state() if output_final_state else None, forward.context
