"""The gated RMS norm on checked inputs, forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .. import config
from ..programs.attention_fields import DTYPE_CODES
from ..programs.gated_norm_backward import tile_rows, workspace_bytes
from ..runtime.device import arch_of_device
from .checks import DTYPE_NAMES
from .problem import NormProblem
from .recorder import AT_ONCE, Executor
from .select import select_norm


@dataclass(frozen=True)
class NormInputs:
    """x ``[T, HV, D]``, gate like x or ``[T, HV * D]``, weight ``[D]``; x and gate of one dtype.

    A batch dimension may stand before T if both can be counted as one. ``executor`` runs the launches on them; under a
    ``Recorder`` they are operands.
    """

    x: torch.Tensor
    gate: torch.Tensor
    weight: torch.Tensor
    eps: float
    executor: Executor = AT_ONCE

    @property
    def num_rows(self) -> int:
        """T * HV, the tokens of a batch together."""
        return math.prod(self.x.shape[:-1])

    @property
    def head_dim(self) -> int:
        """D."""
        return self.x.shape[-1]

    def problem(self) -> NormProblem:
        """What must be solved, for ``select``."""
        return NormProblem(arch_of_device(self.x.device).name, DTYPE_NAMES[self.x.dtype], self.head_dim)

    def empty_like(self, like: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor that is not initialised."""
        return self.executor.empty(like.shape, like.dtype, self.x.device)

    def strides(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        """Return the strides per token, head and channel of a tensor like x or like the gate."""
        if tensor.dim() == self.x.dim():
            return tensor.stride()[-3:]
        token, channel = tensor.stride()[-2:]
        return token, self.head_dim * channel, channel

    def values(self) -> dict[str, object]:
        """The values of the argument fields that both programs share."""
        num_value_heads = self.x.shape[-2]
        return {
            "x": self.x.data_ptr(),
            "gate": self.gate.data_ptr(),
            "weight": self.weight.data_ptr(),
            "x_strides": self.strides(self.x),
            "gate_strides": self.strides(self.gate),
            "num_tokens": self.num_rows // num_value_heads,
            "num_value_heads": num_value_heads,
            "weight_dtype": DTYPE_CODES[DTYPE_NAMES[self.weight.dtype]],
            "eps": self.eps,
        }

    def launch(self, program: str, **values: object) -> None:
        """Launch one of the two programs."""
        chosen = select_norm(program, self.problem(), config.read("FAMILY"))
        self.executor.launch(chosen.record, chosen.reason, self.values() | values, self.x.device)


def norm_forward(inputs: NormInputs) -> torch.Tensor:
    """Launch the forward; returns y in the gate's shape."""
    y = inputs.empty_like(inputs.gate)
    if inputs.num_rows > 0:
        inputs.launch("gated_norm_forward", y=y.data_ptr())
    return y


def norm_backward(inputs: NormInputs, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the backward; returns dx, dgate and dweight. dy has the gate's shape."""
    dx, dgate, dweight = map(inputs.empty_like, (inputs.x, inputs.gate, inputs.weight))
    if inputs.num_rows == 0:
        return dx, dgate, dweight.zero_()
    num_bytes = workspace_bytes(inputs.num_rows, inputs.head_dim)
    workspace = inputs.executor.empty((num_bytes,), torch.uint8, inputs.x.device)
    inputs.launch(
        "gated_norm_backward",
        dy=dy.data_ptr(),
        dy_strides=inputs.strides(dy),
        dx=dx.data_ptr(),
        dgate=dgate.data_ptr(),
        dweight=dweight.data_ptr(),
        workspace=workspace.data_ptr(),
        workspace_bytes=num_bytes,
        tile_rows=tile_rows(inputs.num_rows),
    )
    return dx, dgate, dweight
