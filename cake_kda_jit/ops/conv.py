"""The causal depthwise convolution on checked inputs, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import config
from ..programs.attention_fields import DTYPE_CODES
from ..programs.conv_backward import workspace_bytes
from ..programs.conv_forward import join_parts, tile_tokens
from ..runtime.device import arch_of_device
from .checks import DTYPE_NAMES
from .pipeline import address
from .problem import ConvProblem
from .recorder import AT_ONCE, Executor
from .select import select_conv


@dataclass(frozen=True)
class ConvInputs:
    """x ``[T, D]``, weight ``[D, W]``, bias ``[D]``, initial_state ``[N, D, W - 1]``, cu_seqlens ``[N + 1]``.

    A batch dimension may stand before x's T if both can be counted as one.
    bias and initial_state may be None. ``has_spare_rows``: the last document may end before x does; such rows of y and
    dx are 0. ``executor`` runs the launches on them; under a ``Recorder`` they are operands.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor
    has_spare_rows: bool
    use_silu: bool
    executor: Executor = AT_ONCE

    @property
    def num_tokens(self) -> int:
        """T, those of a batch together."""
        return math.prod(self.x.shape[:-1])

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of both states: initial_state's, x's without one."""
        return self.x.dtype if self.initial_state is None else self.initial_state.dtype

    def state_shape(self) -> tuple[int, int, int]:
        """``[N, D, W - 1]``."""
        return (self.cu_seqlens.shape[0] - 1, self.x.shape[-1], self.weight.shape[1] - 1)

    def problem(self) -> ConvProblem:
        """What must be solved, for ``select``."""
        arch = arch_of_device(self.x.device).name
        return ConvProblem(arch, DTYPE_NAMES[self.x.dtype], self.x.shape[-1], self.weight.shape[1])

    def empty_rows(self) -> torch.Tensor:
        """Return a contiguous tensor like x: 0 where there are rows that no program writes, else not initialised."""
        return self.executor.empty(self.x.shape, self.x.dtype, self.x.device, is_zero=self.has_spare_rows)

    def empty_like(self, like: torch.Tensor | None) -> torch.Tensor | None:
        """Return a contiguous tensor that is not initialised, None for an absent one."""
        return None if like is None else self.executor.empty(like.shape, like.dtype, self.x.device)

    def values(self, family: str) -> dict[str, object]:
        """The values of the argument fields that both programs share in a family."""
        values = {
            "x": self.x.data_ptr(),
            "weight": self.weight.data_ptr(),
            "bias": address(self.bias),
            "initial_state": address(self.initial_state),
            "cu_seqlens": self.cu_seqlens.data_ptr(),
            "x_strides": self.x.stride()[-2:],
            "num_channels": self.x.shape[-1],
            "num_documents": self.cu_seqlens.shape[0] - 1,
            "width": self.weight.shape[1],
            "use_silu": int(self.use_silu),
            "weight_dtype": DTYPE_CODES[DTYPE_NAMES[self.weight.dtype]],
            "state_dtype": DTYPE_CODES[DTYPE_NAMES[self.state_dtype]],
        }
        if family == "cpu":
            return values
        return values | {"num_tokens": self.num_tokens, "tile_tokens": tile_tokens(self.num_tokens, self.x.shape[-1])}


def conv_forward(inputs: ConvInputs, *, output_final_state: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the forward; returns y ``[T, D]`` and the final state ``[N, D, W - 1]`` where it is wanted."""
    executor, device = inputs.executor, inputs.x.device
    y = inputs.empty_rows()
    final_state = executor.empty(inputs.state_shape(), inputs.state_dtype, device) if output_final_state else None
    if inputs.num_tokens == 0:
        if final_state is not None:
            final_state.zero_() if inputs.initial_state is None else final_state.copy_(inputs.initial_state)
        return y, final_state
    _launch("conv_forward", [inputs], [{"y": y.data_ptr(), "final_state": address(final_state)}])
    return y, final_state


def conv_forward_together(many: Sequence[ConvInputs]) -> list[torch.Tensor]:
    """Return y of each of up to three convolutions of the same tokens, at least one, and documents, without states.

    They are one launch if their widths and dtypes allow that, and have the bits of ``conv_forward``.
    """
    ys = [inputs.empty_rows() for inputs in many]
    for group in _groups(many):
        _launch("conv_forward", *zip(*[(many[i], {"y": ys[i].data_ptr(), "final_state": None}) for i in group]))
    return ys


def conv_backward(
    inputs: ConvInputs, dy: torch.Tensor, dfinal_state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Launch the backward; returns dx, dweight, dbias and dinitial_state, None where the input is absent."""
    (gradients,) = conv_backward_together([inputs], [dy], [dfinal_state])
    return gradients


def conv_backward_together(
    many: Sequence[ConvInputs], dys: Sequence[torch.Tensor], dfinal_states: Sequence[torch.Tensor | None] | None = None
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]]:
    """Return what ``conv_backward`` does of each of up to three convolutions of the same tokens and documents.

    They are one launch if their widths, dtypes and dtypes of states allow that. No ``dfinal_states``: none has one.
    """
    gradients = [_empty_gradients(inputs) for inputs in many]
    dfinal_states = [None] * len(many) if dfinal_states is None else dfinal_states
    if many[0].num_tokens == 0:
        for found, dfinal_state in zip(gradients, dfinal_states):
            _fill_without_tokens(found, dfinal_state)
        return gradients
    for group in _groups(many):
        _launch_backward(*zip(*[(many[i], gradients[i], dys[i], dfinal_states[i]) for i in group]))
    return gradients


def _fill_without_tokens(gradients: Sequence[torch.Tensor | None], dfinal_state: torch.Tensor | None) -> None:
    _, dweight, dbias, dinitial_state = gradients
    for tensor in (dweight, dbias, dinitial_state):
        if tensor is not None:
            tensor.zero_()
    if dinitial_state is not None and dfinal_state is not None:
        dinitial_state.copy_(dfinal_state)


def _groups(many: Sequence[ConvInputs]) -> list[list[int]]:
    """The numbers of those that are a launch: all if they share what a launch has once, else each by itself."""
    kinds = {(one.x.dtype, one.weight.dtype, one.weight.shape[1], one.state_dtype) for one in many}
    return [list(range(len(many)))] if len(kinds) == 1 else [[i] for i in range(len(many))]


def _empty_gradients(inputs: ConvInputs) -> tuple[torch.Tensor | None, ...]:
    """dx, dweight, dbias and dinitial_state, to be filled; None where the input is absent."""
    return inputs.empty_rows(), *map(inputs.empty_like, (inputs.weight, inputs.bias, inputs.initial_state))


def _launch_backward(
    parts: Sequence[ConvInputs],
    gradients: Sequence[tuple[torch.Tensor | None, ...]],
    dys: Sequence[torch.Tensor],
    dfinal_states: Sequence[torch.Tensor | None],
) -> None:
    own, workspaces = [], []
    for inputs, found, dy, dfinal_state in zip(parts, gradients, dys, dfinal_states):
        values = dict(zip(("dx", "dweight", "dbias", "dinitial_state"), map(address, found)))
        values |= {"dy": dy.data_ptr(), "dy_strides": dy.stride()[-2:], "dfinal_state": address(dfinal_state)}
        if inputs.x.device.type != "cpu":
            size = workspace_bytes(inputs.num_tokens, inputs.x.shape[-1], inputs.weight.shape[1])
            workspaces.append(inputs.executor.empty((size,), torch.uint8, inputs.x.device))
            values |= {"workspace": workspaces[-1].data_ptr(), "workspace_bytes": size}
        own.append(values)
    _launch("conv_backward", parts, own)


def _launch(program: str, parts: Sequence[ConvInputs], own: Sequence[dict[str, object]]) -> None:
    """Launch a program on convolutions that share a launch; ``own`` are the values that each has in this program."""
    inputs = parts[0]
    chosen = select_conv(program, inputs.problem(), config.read("FAMILY"))
    family, entry = chosen.record.family, chosen.record.entry
    values = join_parts(entry, [part.values(family) | found for part, found in zip(parts, own)])
    inputs.executor.launch(chosen.record, chosen.reason, values, inputs.x.device)
