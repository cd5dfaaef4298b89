"""The forward of ``chunk_kda`` on one rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..ops.forward import Context, make_context
from ..ops.pipeline import Pipeline, Tiles
from ..ops.select import select_attention
from ..ops.workspace import HeadBlock
from .passes import ParallelPass
from .tables import PhaseTables


class _Forward:
    """The tensors of one forward. States of a phase have a row per span, in the phase's order."""

    def __init__(self, call: ParallelPass, output_final_state: bool, keep: bool) -> None:
        self.call, self.phases = call, call.tables.forward
        inputs, options = call.inputs, call.ctx.options
        if keep:
            # A target without a backward is refused here, not after the forward of a whole model.
            select_attention("chunk_grad", inputs.problem, call.pipeline.family)
        self.o = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device)
        self.context: Context = make_context(inputs, options, keep)
        self.M = call.pipeline.summaries() if self.context.M is None else self.context.M
        self.B = call.pipeline.summaries()
        self.heads_exit = call.state(self.phases.heads.size)
        self.entered_entry: torch.Tensor | None = None
        self.whole_exit = self.entered_exit = None
        if output_final_state:
            self.whole_exit = call.state(self.phases.whole.size)
            self.entered_exit = call.state(self.phases.entered.size)
        self.heads_entry, self.whole_entry = (
            None if inputs.initial_state is None else inputs.initial_state.index_select(0, phase.documents)
            for phase in (self.phases.heads, self.phases.whole)
        )

    def steps(self, block: HeadBlock) -> Iterator[None]:
        """All of a head block; yields while its exchange is under way."""
        call, phases = self.call, self.phases
        tiles = None
        if call.has_chunks:
            tiles = call.pipeline.make_tiles(block, **self.context.tiles(block))
            call.pipeline.prepare(block, tiles)
            call.summarize(block, tiles, M=self.M, B=self.B)
            self._scan(block, tiles, phases.heads, self.heads_entry, self.heads_exit)
        finish = call.start(block, self.heads_exit, self.M, self.B)
        if call.has_chunks:
            self._scan(block, tiles, phases.whole, self.whole_entry, self.whole_exit)
        yield
        self.entered_entry = call.filled(self.entered_entry, block, finish())
        if call.has_chunks:
            self._scan(block, tiles, phases.entered, self.entered_entry, self.entered_exit)

    def _scan(self, block: HeadBlock, tiles: Tiles, phase: PhaseTables, entry, exit_) -> None:
        if phase.size == 0:
            return
        pipeline: Pipeline = self.call.of_phase(phase, entry)
        segment_entry = pipeline.walk(block, self.M, self.B, entry, transpose=False) if phase.is_cut else None
        outputs = {
            "o": self.o,
            "final_state": exit_,
            "h": self.context.block("h", block),
            "v_new": self.context.block("v_new", block),
            "checkpoints": self.context.checkpoints,
        }
        pipeline.scan(block, tiles, segment_entry, outputs, self.call.ctx.options.checkpoint_tokens)

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
