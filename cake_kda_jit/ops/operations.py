"""The differentiable operations as their forward and backward on checked tensors, whoever runs the launches.

A forward returns its outputs and what it keeps by name; a backward takes the same tensors, what was kept, and a
gradient for each output, and returns the gradients of the first ``num_differentiable`` tensors, None where one is
absent. All of it works on tensors and, under a ``Recorder``, on operands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .backward import chunk_backward
from .conv import ConvInputs, conv_backward, conv_backward_together, conv_forward, conv_forward_together
from .forward import CONTEXT_NAMES, Context, chunk_forward
from .inputs import Inputs, Transforms, joined
from .norm import NormInputs, norm_backward, norm_forward
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
class GatedNorm:
    """``gated_rms_norm`` on x, gate and weight. Its output is y. Nothing is kept."""

    eps: float

    name = "gated_rms_norm"
    num_differentiable = 3

    def has_work(self, tensors: tuple) -> bool:
        """Whether there is a row: without one nothing is launched."""
        return tensors[0].numel() > 0

    def join(self, tensors: tuple) -> tuple:
        """Return the tensors as the programs take them: copied where a batch's rows cannot be counted as one."""
        x, gate, weight = tensors
        return joined(x, 3), joined(gate, self._rank(x, gate)), weight

    def forward(self, executor: Executor, tensors: tuple, *, keep: bool) -> tuple[tuple, dict]:
        """Launch the forward."""
        return (norm_forward(NormInputs(*tensors, self.eps, executor)),), {}

    def backward(self, executor: Executor, tensors: tuple, kept: dict, directions: tuple) -> tuple:
        """Launch the backward."""
        return norm_backward(NormInputs(*tensors, self.eps, executor), *directions)

    def complete(self, tensors: tuple, directions: tuple) -> tuple:
        """Return the gradient of y as a backward takes it."""
        x, gate, _ = tensors[:3]
        return (joined(given_like(directions[0], gate), self._rank(x, gate)),)

    def _rank(self, x: torch.Tensor, gate: torch.Tensor) -> int:
        """The dimensions of the gate without a batch's: its heads and channels may be one."""
        return 3 - (x.dim() - gate.dim())


@dataclass(frozen=True)
class BetweenProjections:
    """All that a layer does between its projections: convolutions of what becomes q, k and v, ``chunk_kda``, the norm.

    Its tensors are the three before their convolutions ``[B, T, D]``, the three weights ``[D, 1, W]``, g
    ``[B, T, HV * K]``, beta, A_log, dt_bias, the norm's gate ``[B, T, HV * V]`` and weight, the tables of ``Attention``
    and cu_seqlens. Its output is y ``[B, T, HV * V]``. It keeps q, k, v and o beside what ``attention`` keeps. Only for
    a ``Recorder``: shapes are changed without a view.
    """

    attention: Attention
    eps: float

    name = "between_projections"
    num_differentiable = 12
    have_tokens = (0, 1, 2, 6, 7, 10)  # the numbers of its tensors of a row for each token

    def has_work(self, tensors: tuple) -> bool:
        """Whether there is a token: without one nothing is launched."""
        return tensors[12].shape[0] > 0

    def join(self, tensors: tuple) -> tuple:
        """Return the tensors as the programs take them: copied where a batch's rows cannot be counted as one."""
        return tuple(joined(one, 2) if n in self.have_tokens else one.contiguous() for n, one in enumerate(tensors))

    def forward(self, executor: Recorder, tensors: tuple, *, keep: bool) -> tuple[tuple, dict]:
        """Launch the forward."""
        rows = conv_forward_together(self._convolutions(executor, tensors))
        mixed = {name: self._heads(one, tensors) for name, one in zip(("q", "k", "v"), rows)}
        (o, _), kept = self.attention.forward(executor, self._attended(mixed, tensors), keep=keep)
        y = norm_forward(self._norm(executor, o, tensors))
        return (y,), kept | mixed | {"o": o} if keep else {}

    def backward(self, executor: Recorder, tensors: tuple, kept: dict, directions: tuple) -> tuple:
        """Launch the backward."""
        mixed = {name: kept[name] for name in ("q", "k", "v")}
        context = {name: one for name, one in kept.items() if name not in (*mixed, "o")}
        do, dgate, dnorm = norm_backward(self._norm(executor, kept["o"], tensors), *directions)
        *d_mixed, dg, dbeta, dA_log, ddt_bias, _ = self.attention.backward(
            executor, self._attended(mixed, tensors), context, (do, None)
        )
        dys = [dy.view(x.shape) for x, dy in zip(tensors[:3], d_mixed)]
        d_rows, d_weights, *_ = zip(*conv_backward_together(self._convolutions(executor, tensors), dys))
        d_weights = [dweight.view(weight.shape) for weight, dweight in zip(tensors[3:6], d_weights)]
        return *d_rows, *d_weights, dg.view(tensors[6].shape), dbeta, dA_log, ddt_bias, dgate, dnorm

    def complete(self, tensors: tuple, directions: tuple) -> tuple:
        """Return the gradient of y as a backward takes it."""
        return (joined(given_like(directions[0], tensors[10]), 2),)

    def _convolutions(self, executor: Recorder, tensors: tuple) -> list[ConvInputs]:
        rest = (None, None, tensors[-1], self.attention.has_spare_rows, True, executor)
        return [
            ConvInputs(x, weight.view((weight.shape[0], weight.shape[2])), *rest)
            for x, weight in zip(tensors[:3], tensors[3:6])
        ]

    def _attended(self, mixed: dict, tensors: tuple) -> tuple:
        """The tensors of ``attention``."""
        g, beta, A_log, dt_bias, _, _, *tables, _ = tensors[6:]
        return *mixed.values(), self._heads(g, tensors), beta, A_log, dt_bias, None, *tables

    def _norm(self, executor: Recorder, o: Operand, tensors: tuple) -> NormInputs:
        return NormInputs(o, *tensors[10:12], self.eps, executor)

    def _heads(self, rows: Operand, tensors: tuple) -> Operand:
        head_dim = tensors[2].shape[-1] // tensors[7].shape[-1]
        return rows.unflatten(-1, (rows.shape[-1] // head_dim, head_dim))


Operation = Attention | Convolution | GatedNorm | BetweenProjections


def given_like(direction: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """Return a gradient as its memory holds it, zeros for one that autograd does not give; of ``tensor``'s shape."""
    return tensor.new_zeros(()).expand(tensor.shape) if direction is None else direction.resolve_neg()


def whole_direction(direction: torch.Tensor | None) -> torch.Tensor | None:
    """Return a state's gradient, contiguous."""
    return None if direction is None else direction.resolve_neg().contiguous()
