"""The backward of ``chunk_kda`` on one rank. It exchanges gradients of states; a replay exchanges nothing more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import torch

from ..ops.backward import Gradients, empty_gradients, empty_partials, prepare_again
from ..ops.forward import Context, kept_tiles
from ..ops.pipeline import Tiles
from ..ops.workspace import HeadBlock
from .parts import Tensors
from .passes import EVERY_HEAD, ParallelPass, Part
from .tables import PhaseTables

GRADIENTS = tuple(field.name for field in fields(Gradients))
PARTIALS = ("partial_A_log", "partial_dt_bias")
MADE = ("memory", "h", "v_new", "dS", "z")
"""What the first part makes for the others: tiles, and what the scans leave; h and v' where they are replayed."""


class _Backward:
    """The tensors of one backward. Gradients of states have a row per span of a phase, in the phase's order."""

    def __init__(self, call: ParallelPass, context: Context, dfinal_state: torch.Tensor | None) -> None:
        self.call, self.context = call, context
        self.phases = phases = call.tables.backward
        inputs = call.inputs
        # Not by what is kept: a rank without tokens keeps nothing, and must cut heads into the blocks of all others.
        self.replays = call.ctx.options.backward == "replay"
        self.D, self.heads_start, *made = call.run_part("make", EVERY_HEAD, self._make, {"like": inputs.initial_state})
        self.gradients = Gradients(*made[: len(GRADIENTS)])
        self.partials = dict(zip(PARTIALS, made[len(GRADIENTS) :]))
        self.filled = {
            name: getattr(self.gradients, name) for name in ("dq", "dk", "dv", "dg", "dbeta")
        } | self.partials
        self.tensors = {"do": call.do, "D": self.D, "memory": None, **vars(context), **self.filled}
        self.entered_end: torch.Tensor | None = None
        self.heads_end, self.whole_end = (
            None if dfinal_state is None else dfinal_state.index_select(0, phase.documents)
            for phase in (phases.heads, phases.whole)
        )
        self.whole_start = self.entered_start = None
        if inputs.initial_state is not None:
            self.whole_start, self.entered_start = call.state(phases.whole.size), call.state(phases.entered.size)

    def _make(self, part: Part) -> Sequence:
        """D, the gradients at the starts of heads, and the fields of the gradients and of the parameters' parts."""
        pipeline = part.pipeline(initial_state=part.tensors["like"])
        states = pipeline.inputs.empty(self.call.state_shape(self.phases.heads.size))
        partials = empty_partials(pipeline)
        gradients = vars(empty_gradients(pipeline.inputs)).values()
        return pipeline.summaries(), states, *gradients, *(partials[name] for name in PARTIALS)

    def steps(self, block: HeadBlock) -> Iterator[None]:
        """All of a head block; yields while its exchange is under way."""
        call, phases = self.call, self.phases
        made: Tensors = {}
        if call.has_chunks:
            edges = self._edges(phases.heads, self.heads_end, self.heads_start)
            found = call.run_part("first", block, self._first, {"summarized": call.tables.summarized} | edges)
            made = {name: tensor for name, tensor in zip(MADE, found) if tensor is not None}
        finish = call.start(block, self.heads_start, self.context.M, self.D)
        if call.has_chunks and phases.whole.size and not self.replays:
            edges = self._edges(phases.whole, self.whole_end, self.whole_start)
            call.run_part("whole", block, self._whole, edges | made)
        last = None
        if call.has_chunks and not self.replays:
            edges = self._edges(phases.entered, None, self.entered_start)
            last = call.prepare_part("last", block, self._last, edges | made)
        yield
        self.entered_end = call.filled(self.entered_end, block, finish())
        if last is not None:
            last({"end": self.entered_end})
        elif call.has_chunks:
            self._replay(block, made)

    def _edges(self, phase: PhaseTables, end: torch.Tensor | None, start: torch.Tensor | None) -> Tensors:
        """What a part that scans a phase is given."""
        tables = {"segment_table": phase.segment_table, "summary_offsets": phase.summary_offsets}
        return self.tensors | tables | {"end": end, "start": start}

    def _first(self, part: Part) -> Sequence:
        pipeline, block = part.pipeline(), part.block
        tiles = prepare_again(pipeline, block, part.context)
        part.summarize(tiles, M=None, B=part.tensors["D"], do=part.tensors["do"])
        made = {"memory": tiles.memory, "dS": pipeline.states(block), "z": pipeline.gradients(block)}
        if self.replays:
            made |= {"h": pipeline.states(block), "v_new": pipeline.values(block)}
        part = part._replace(tensors=part.tensors | made)
        self._scan(part, tiles, self.phases.heads)
        return [made.get(name) for name in MADE]

    def _whole(self, part: Part) -> Sequence:
        self._scan(part, part.tiles(), self.phases.whole)
        return ()

    def _last(self, part: Part) -> Sequence:
        if self.replays:
            self._scan(part, part.tiles(), self.call.tables.all, part.tensors["checkpoints"])
        else:
            self._scan(part, part.tiles(), self.phases.entered)
        tensors, context, block = part.tensors, part.context, part.block
        states = {"h": context.block("h", block), "v_new": context.block("v_new", block)}
        found = {name: tensors[name] for name in ("dS", "z", *self.filled)}
        part.pipeline().grad(block, tensors["do"], states | found)
        return ()

    def _scan(self, part: Part, tiles: Tiles, phase: PhaseTables, checkpoints=None) -> None:
        """``grad_scan`` from the gradients at the spans' ends to those at their starts, each None for none."""
        if phase.size == 0:
            return
        tensors, context, block = part.tensors, part.context, part.block
        pipeline = part.pipeline(tensors["segment_table"], tensors["summary_offsets"])
        segment_dexit = None
        if phase.is_cut:
            segment_dexit = pipeline.walk(block, tensors["M"], tensors["D"], tensors["end"], transpose=True)
        edges = {
            "h": context.block("h", block),
            "v_new": context.block("v_new", block),
            "dS": tensors["dS"],
            "z": tensors["z"],
            "checkpoints": checkpoints,
            "dfinal_state": tensors["end"],
            "segment_dexit": segment_dexit,
            "dinitial_state": tensors["start"],
        }
        pipeline.grad_scan(block, tiles, tensors["do"], edges, self.call.ctx.options.checkpoint_tokens)

    def _replay(self, block: HeadBlock, made: Tensors) -> None:
        """All spans in one launch, heads once more: a replay numbers checkpoints by the table of all segments."""
        every, inputs = self.call.tables.all, self.call.inputs
        end = self.call.state(every.size).zero_()
        ends = (self.heads_end, self.whole_end, self.entered_end)
        for phase, rows in zip(self.phases, ends):
            if rows is not None:
                end.index_copy_(0, phase.places, rows)
        start = None if inputs.initial_state is None else self.call.state(every.size)
        self.call.run_part("last", block, self._last, self._edges(every, end, start) | made)
        if start is not None:
            heads = slice(block.first, block.first + block.count)
            for phase, target in ((self.phases.whole, self.whole_start), (self.phases.entered, self.entered_start)):
                target[:, heads] = start[:, heads].index_select(0, phase.places)

    def finish(self, dfinal_state: torch.Tensor | None) -> Gradients:
        """Return all gradients: those of parameters are this rank's part, those of initial states its documents'."""
        inputs, gradients = self.call.inputs, self.gradients
        if not self.call.has_chunks:
            for tensor in (gradients.dA_log, gradients.ddt_bias):
                if tensor is not None:
                    tensor.zero_()
        elif inputs.A_log is not None or inputs.dt_bias is not None:
            given = self.partials | {"dA_log": gradients.dA_log, "ddt_bias": gradients.ddt_bias}
            self.call.run_part("reduce", EVERY_HEAD, self._reduce, given)
        if inputs.initial_state is None:
            return gradients
        return replace(gradients, dinitial_state=self._initial_state_gradient(dfinal_state))

    def _reduce(self, part: Part) -> Sequence:
        names = ("dA_log", "ddt_bias", *self.partials)
        part.pipeline().reduce_parameters(**{name: part.tensors[name] for name in names})
        return ()

    def _initial_state_gradient(self, dfinal_state: torch.Tensor | None) -> torch.Tensor:
        found = self.gradients.dinitial_state.zero_()
        whole, entered = self.phases.whole, self.phases.entered
        if self.call.has_chunks:
            found.index_copy_(0, whole.documents, self.whole_start)
        elif dfinal_state is not None:  # all whole documents are empty
            found.index_copy_(0, whole.documents, self.whole_end)
        # First spans come first in this phase.
        num_first = entered.size - self.call.tables.inner.size
        return found.index_copy_(0, entered.documents[:num_first], self.entered_start[:num_first])


def parallel_backward(call: ParallelPass, context: Context, dfinal_state: torch.Tensor | None) -> Gradients:
    """Return the gradients; dfinal_state ``[N, HV, K, V]`` contiguous."""
    backward = _Backward(call, context, dfinal_state)
    replays = int(backward.replays)
    call.run(backward.steps, states=1 + replays, values=1 + replays, kept=kept_tiles(call.ctx.options))
    return backward.finish(dfinal_state)
