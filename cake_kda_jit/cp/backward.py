"""The backward of ``chunk_kda`` on one rank. It exchanges gradients of states; a replay exchanges nothing more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..ops.backward import Gradients, empty_gradients, empty_partials, prepare_again
from ..ops.forward import Context, kept_tiles
from ..ops.pipeline import Tiles
from ..ops.workspace import HeadBlock
from .passes import ParallelPass
from .tables import PhaseTables


class _Backward:
    """The tensors of one backward. Gradients of states have a row per span of a phase, in the phase's order."""

    def __init__(self, call: ParallelPass, context: Context, do: torch.Tensor, dfinal_state) -> None:
        self.call, self.context, self.do = call, context, do
        self.phases = phases = call.tables.backward
        inputs = call.inputs
        # Not by what is kept: a rank without tokens keeps nothing, and must cut heads into the blocks of all others.
        self.replays = call.ctx.options.backward == "replay"
        self.gradients: Gradients = empty_gradients(inputs)
        self.partials = empty_partials(call.pipeline)
        self.D = call.pipeline.summaries()
        self.heads_start = call.state(phases.heads.size)
        self.entered_end: torch.Tensor | None = None
        self.heads_end, self.whole_end = (
            None if dfinal_state is None else dfinal_state.index_select(0, phase.documents)
            for phase in (phases.heads, phases.whole)
        )
        self.whole_start = self.entered_start = None
        if inputs.initial_state is not None:
            self.whole_start, self.entered_start = call.state(phases.whole.size), call.state(phases.entered.size)

    def steps(self, block: HeadBlock) -> Iterator[None]:
        """All of a head block; yields while its exchange is under way."""
        call, phases = self.call, self.phases
        tiles, tensors = None, {}
        if call.has_chunks:
            tiles = prepare_again(call.pipeline, block, self.context)
            call.summarize(block, tiles, M=None, B=self.D, do=self.do)
            tensors = self._tensors(block)
            self._scan(block, tiles, tensors, phases.heads, self.heads_end, self.heads_start)
        finish = call.start(block, self.heads_start, self.context.M, self.D)
        if call.has_chunks and not self.replays:
            self._scan(block, tiles, tensors, phases.whole, self.whole_end, self.whole_start)
        yield
        self.entered_end = call.filled(self.entered_end, block, finish())
        if not call.has_chunks:
            return
        if self.replays:
            self._scan_all(block, tiles, tensors)
        else:
            self._scan(block, tiles, tensors, phases.entered, self.entered_end, self.entered_start)
        found = {name: getattr(self.gradients, name) for name in ("dq", "dk", "dv", "dg", "dbeta")}
        call.pipeline.grad(block, self.do, tensors | found | self.partials)

    def _tensors(self, block: HeadBlock) -> dict[str, torch.Tensor]:
        pipeline, context = self.call.pipeline, self.context
        return {
            "h": pipeline.states(block) if self.replays else context.block("h", block),
            "v_new": pipeline.values(block) if self.replays else context.block("v_new", block),
            "dS": pipeline.states(block),
            "z": pipeline.gradients(block),
        }

    def _scan(self, block, tiles: Tiles, tensors, phase: PhaseTables, end, start, checkpoints=None) -> None:
        """``grad_scan`` from the gradients at the spans' ends to those at their starts, each None for none."""
        if phase.size == 0:
            return
        pipeline = self.call.of_phase(phase)
        segment_dexit = pipeline.walk(block, self.context.M, self.D, end, transpose=True) if phase.is_cut else None
        edges = {
            "checkpoints": checkpoints,
            "dfinal_state": end,
            "segment_dexit": segment_dexit,
            "dinitial_state": start,
        }
        pipeline.grad_scan(block, tiles, self.do, tensors | edges, self.call.ctx.options.checkpoint_tokens)

    def _scan_all(self, block: HeadBlock, tiles: Tiles, tensors) -> None:
        """All spans in one launch, heads once more: a replay numbers checkpoints by the table of all segments."""
        every, inputs = self.call.tables.all, self.call.inputs
        end = self.call.state(every.size).zero_()
        ends = (self.heads_end, self.whole_end, self.entered_end)
        for phase, rows in zip(self.phases, ends):
            if rows is not None:
                end.index_copy_(0, phase.places, rows)
        start = None if inputs.initial_state is None else self.call.state(every.size)
        self._scan(block, tiles, tensors, every, end, start, self.context.checkpoints)
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
            self.call.pipeline.reduce_parameters(**self.partials, dA_log=gradients.dA_log, ddt_bias=gradients.ddt_bias)
        if inputs.initial_state is None:
            return gradients
        return replace(gradients, dinitial_state=self._initial_state_gradient(dfinal_state))

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


def parallel_backward(
    call: ParallelPass, context: Context, do: torch.Tensor, dfinal_state: torch.Tensor | None
) -> Gradients:
    """Return the gradients; do of the rank's tokens, of any strides, dfinal_state ``[N, HV, K, V]`` contiguous."""
    backward = _Backward(call, context, do, dfinal_state)
    replays = int(backward.replays)
    call.run(backward.steps, states=1 + replays, values=1 + replays, kept=kept_tiles(call.ctx.options))
    return backward.finish(dfinal_state)
