"""The differentiable operations as their forward and backward on checked tensors, whoever runs the launches.

A forward returns its outputs and what it keeps by name; a backward takes the same tensors, what was kept, and a
gradient for each output, and returns the gradients of the first ``num_differentiable`` tensors, None where one is
absent. All of it works on tensors and, under a ``Recorder``, on operands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .backward import chunk_backward
from .conv import ConvInputs, conv_backward, conv_forward
from .forward import CONTEXT_NAMES, Context, chunk_forward
from .inputs import Inputs, Transforms, joined
from .pipeline import Pipeline
from .problem import KdaOptions
from .recorder import Executor, Operand, Recorder


@dataclass(frozen=True)
class Attention:
    """``chunk_kda`` on q, k, v, g, beta, A_log, dt_bias, initial_state, chunk_table, segment_table, summary_offsets.

    Its outputs are o and final_state, None unless ``output_final_state``.
    """

    num_summaries: int
    has_spare_rows: bool
    transforms: Transforms
    options: KdaOptions
    output_final_state: bool = False

    name = "chunk_kda"
    num_differentiable = 8

    def has_work(self, tensors: tuple) -> bool:
        """Whether there is a token: without one nothing is launched."""
        return tensors[8].shape[0] > 0

    def join(self, tensors: tuple) -> tuple:
        """Return the tensors as the programs take them: copied where a batch's rows cannot be counted as one."""
        q, k, v, g, beta, *others = tensors
        return (*(joined(tensor, 3) for tensor in (q, k, v, g)), joined(beta, 2), *others)

    def forward(self, executor: Executor, tensors: tuple, *, keep: bool) -> tuple[tuple, dict]:
        """Launch the forward; what is kept is named as in ``Context``."""
        o, final_state, context = chunk_forward(
            self._pipeline(executor, tensors), self.options, output_final_state=self.output_final_state, keep=keep
        )
        return (o, final_state), {name: getattr(context, name) for name in CONTEXT_NAMES}

    def backward(self, executor: Executor, tensors: tuple, kept: dict, directions: tuple) -> tuple:
        """Launch the backward; directions as ``complete`` returns them."""
        pipeline = self._pipeline(executor, tensors)
        return tuple(vars(chunk_backward(pipeline, self.options, Context(**kept), *directions)).values())

    def complete(self, tensors: tuple, directions: tuple) -> tuple:
        """Return the gradients of o and of final_state as a backward takes them: the former always given."""
        do, dfinal_state = directions
        return joined(given_like(do, tensors[2]), 3), whole_direction(dfinal_state)

    def inputs(self, executor: Executor, tensors: tuple) -> Inputs:
        """Return the tensors by name."""
        return Inputs(*tensors, self.num_summaries, self.has_spare_rows, executor)

    def _pipeline(self, executor: Executor, tensors: tuple) -> Pipeline:
        return Pipeline(self.inputs(executor, tensors), self.transforms, self.options.family)


@dataclass(frozen=True)
class Convolution:
    """``causal_conv1d`` on x, weight, bias, initial_state, cu_seqlens.

    Its outputs are y and final_state, None unless ``output_final_state``. Nothing is kept.
    """

    has_spare_rows: bool
    use_silu: bool
    output_final_state: bool = False

    name = "causal_conv1d"
    num_differentiable = 4

    def has_work(self, tensors: tuple) -> bool:
        """Whether there is a token: without one nothing is launched."""
        return tensors[0].numel() > 0

    def join(self, tensors: tuple) -> tuple:
        """Return the tensors as the programs take them: copied where a batch's rows cannot be counted as one."""
        return joined(tensors[0], 2), *tensors[1:]

    def forward(self, executor: Executor, tensors: tuple, *, keep: bool) -> tuple[tuple, dict]:
        """Launch the forward."""
        return conv_forward(self._inputs(executor, tensors), output_final_state=self.output_final_state), {}

    def backward(self, executor: Executor, tensors: tuple, kept: dict, directions: tuple) -> tuple:
        """Launch the backward; directions as ``complete`` returns them."""
        return conv_backward(self._inputs(executor, tensors), *directions)

    def complete(self, tensors: tuple, directions: tuple) -> tuple:
        """Return the gradients of y and of final_state as a backward takes them: the former always given."""
        dy, dfinal_state = directions
        return joined(given_like(dy, tensors[0]), 2), whole_direction(dfinal_state)

    def _inputs(self, executor: Executor, tensors: tuple) -> ConvInputs:
        return ConvInputs(*tensors, self.has_spare_rows, self.use_silu, executor)


@dataclass(frozen=True)
class ConvolvedAttention:
    """``chunk_kda`` on convolutions of what becomes q, k and v, as one operation: a layer's calls between projections.

    Its tensors are the three before their convolutions ``[B, T, D]``, the three weights ``[D, 1, W]``, g
    ``[B, T, HV * K]``, beta, A_log, dt_bias, the tables of ``Attention`` and cu_seqlens. Its output is o. It keeps q, k
    and v beside what ``attention`` keeps. Only for a ``Recorder``: shapes are changed without a view.
    """

    attention: Attention

    name = "convolved_chunk_kda"
    num_differentiable = 10

    def has_work(self, tensors: tuple) -> bool:
        """Whether there is a token: without one nothing is launched."""
        return tensors[10].shape[0] > 0

    def join(self, tensors: tuple) -> tuple:
        """Return the tensors as the programs take them: copied where a batch's rows cannot be counted as one."""
        rows, weights, logits, others = tensors[:3], tensors[3:6], tensors[6:8], tensors[8:]
        rows, logits = ([joined(tensor, 2) for tensor in group] for group in (rows, logits))
        return *rows, *(weight.contiguous() for weight in weights), *logits, *(one.contiguous() for one in others)

    def forward(self, executor: Recorder, tensors: tuple, *, keep: bool) -> tuple[tuple, dict]:
        """Launch the forward."""
        mixed = {
            name: self._heads(conv_forward(inputs, output_final_state=False)[0], tensors)
            for name, inputs in zip(("q", "k", "v"), self._convolutions(executor, tensors))
        }
        (o, _), kept = self.attention.forward(executor, self._attended(mixed, tensors), keep=keep)
        return (o,), kept | mixed if keep else {}

    def backward(self, executor: Recorder, tensors: tuple, kept: dict, directions: tuple) -> tuple:
        """Launch the backward."""
        [do] = directions
        mixed = {name: kept[name] for name in ("q", "k", "v")}
        context = {name: one for name, one in kept.items() if name not in mixed}
        *d_mixed, dg, dbeta, dA_log, ddt_bias, _ = self.attention.backward(
            executor, self._attended(mixed, tensors), context, (do, None)
        )
        found = [
            conv_backward(inputs, dy.view(inputs.x.shape), None)
            for inputs, dy in zip(self._convolutions(executor, tensors), d_mixed)
        ]
        d_rows = [dx for dx, *_ in found]
        d_weights = [dweight.view(weight.shape) for weight, (_, dweight, *_) in zip(tensors[3:6], found)]
        return *d_rows, *d_weights, dg.view(tensors[6].shape), dbeta, dA_log, ddt_bias

    def complete(self, tensors: tuple, directions: tuple) -> tuple:
        """Return the gradient of o as a backward takes it."""
        values = tensors[2]
        return (joined(given_like(directions[0], values.unflatten(-1, (tensors[7].shape[-1], -1))), 3),)

    def _convolutions(self, executor: Recorder, tensors: tuple) -> list[ConvInputs]:
        rest = (None, None, tensors[-1], self.attention.has_spare_rows, True, executor)
        return [
            ConvInputs(x, weight.view((weight.shape[0], weight.shape[2])), *rest)
            for x, weight in zip(tensors[:3], tensors[3:6])
        ]

    def _attended(self, mixed: dict, tensors: tuple) -> tuple:
        """The tensors of ``attention``."""
        g, beta, A_log, dt_bias, *tables, _ = tensors[6:]
        return *mixed.values(), self._heads(g, tensors), beta, A_log, dt_bias, None, *tables

    def _heads(self, rows: Operand, tensors: tuple) -> Operand:
        head_dim = tensors[2].shape[-1] // tensors[7].shape[-1]
        return rows.unflatten(-1, (rows.shape[-1] // head_dim, head_dim))


Operation = Attention | Convolution | ConvolvedAttention


def given_like(direction: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """Return a gradient as its memory holds it, zeros for one that autograd does not give; of ``tensor``'s shape."""
    return tensor.new_zeros(()).expand(tensor.shape) if direction is None else direction.resolve_neg()


def whole_direction(direction: torch.Tensor | None) -> torch.Tensor | None:
    """Return a state's gradient, contiguous."""
    return None if direction is None else direction.resolve_neg().contiguous()
