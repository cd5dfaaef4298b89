"""The causal depthwise convolution on checked inputs, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import config
from ..programs.attention_fields import DTYPE_CODES
from ..programs.conv_backward import workspace_bytes
from ..programs.conv_forward import tile_tokens
from ..runtime.device import arch_of_device
from ..runtime.launch import launch
from .checks import DTYPE_NAMES
from .pipeline import address
from .problem import ConvProblem
from .select import select_conv


@dataclass(frozen=True)
class ConvInputs:
    """x ``[T, D]``, weight ``[D, W]``, bias ``[D]``, initial_state ``[N, D, W - 1]``, cu_seqlens ``[N + 1]``.

    bias and initial_state may be None.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor
    use_silu: bool
    state_dtype: torch.dtype

    def state_shape(self) -> tuple[int, int, int]:
        """``[N, D, W - 1]``."""
        return (self.cu_seqlens.shape[0] - 1, self.x.shape[1], self.weight.shape[1] - 1)

    def problem(self) -> ConvProblem:
        """What must be solved, for ``select``."""
        arch = arch_of_device(self.x.device).name
        return ConvProblem(arch, DTYPE_NAMES[self.x.dtype], self.x.shape[1], self.weight.shape[1])

    def values(self, family: str) -> dict[str, object]:
        """The values of the argument fields that both programs share in a family."""
        values = {
            "x": self.x.data_ptr(),
            "weight": self.weight.data_ptr(),
            "bias": address(self.bias),
            "initial_state": address(self.initial_state),
            "cu_seqlens": self.cu_seqlens.data_ptr(),
            "x_strides": self.x.stride(),
            "num_channels": self.x.shape[1],
            "num_documents": self.cu_seqlens.shape[0] - 1,
            "width": self.weight.shape[1],
            "use_silu": int(self.use_silu),
            "weight_dtype": DTYPE_CODES[DTYPE_NAMES[self.weight.dtype]],
            "state_dtype": DTYPE_CODES[DTYPE_NAMES[self.state_dtype]],
        }
        if family == "cpu":
            return values
        return values | {"num_tokens": self.x.shape[0], "tile_tokens": tile_tokens(*self.x.shape)}


def conv_forward(inputs: ConvInputs, *, output_final_state: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the forward; returns y ``[T, D]`` and the final state ``[N, D, W - 1]`` where it is wanted."""
    x = inputs.x
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final_state = x.new_empty(inputs.state_shape(), dtype=inputs.state_dtype) if output_final_state else None
    if x.shape[0] == 0:
        if final_state is not None:
            final_state.zero_() if inputs.initial_state is None else final_state.copy_(inputs.initial_state)
        return y, final_state
    chosen = select_conv("conv_forward", inputs.problem(), config.read("FAMILY"))
    values = inputs.values(chosen.record.family) | {"y": y.data_ptr(), "final_state": address(final_state)}
    launch(chosen.record, chosen.reason, values, x.device)
    return y, final_state


def conv_backward(
    inputs: ConvInputs, dy: torch.Tensor, dfinal_state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Launch the backward; returns dx, dweight, dbias and dinitial_state, None where the input is absent."""
    x = inputs.x
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweight = torch.empty_like(inputs.weight)
    dbias = None if inputs.bias is None else torch.empty_like(inputs.bias)
    dinitial_state = None if inputs.initial_state is None else torch.empty_like(inputs.initial_state)
    if x.shape[0] == 0:
        for tensor in (dweight, dbias, dinitial_state):
            if tensor is not None:
                tensor.zero_()
        if dinitial_state is not None and dfinal_state is not None:
            dinitial_state.copy_(dfinal_state)
        return dx, dweight, dbias, dinitial_state
    chosen = select_conv("conv_backward", inputs.problem(), config.read("FAMILY"))
    family = chosen.record.family
    values = inputs.values(family) | {
        "dy": dy.data_ptr(),
        "dy_strides": dy.stride(),
        "dfinal_state": address(dfinal_state),
        "dx": dx.data_ptr(),
        "dweight": dweight.data_ptr(),
        "dbias": address(dbias),
        "dinitial_state": address(dinitial_state),
    }
    if family != "cpu":
        workspace = x.new_empty(workspace_bytes(*x.shape, inputs.weight.shape[1]), dtype=torch.uint8)
        values |= {"workspace": workspace.data_ptr(), "workspace_bytes": workspace.nbytes}
    launch(chosen.record, chosen.reason, values, x.device)
    return dx, dweight, dbias, dinitial_state
