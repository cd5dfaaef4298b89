"""The two small modules around the attention kernels: a short causal convolution and a gated norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops.api import causal_conv1d
from ..ops.parallel import ParallelContext
from ..ops.plan import Plan


class ShortConvolution(nn.Module):
    """Causal depthwise convolution and SiLU; documents never mix.

    ``weight`` is ``[D, 1, W]``, laid out and initialised like ``nn.Conv1d``'s: the last tap meets the current token.
    W is 2 to 4.
    """

    def __init__(self, num_channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, 1, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as ``nn.Conv1d`` does."""
        bound = self.weight.shape[2] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        plan: Plan | None = None,
        cp_context: ParallelContext | None = None,
    ) -> Tensor:
        """Convolve x ``[B, T, D]``; same shape and dtype. Documents as in ``causal_conv1d``."""
        weight = self.weight.squeeze(1)
        y, _ = causal_conv1d(x, weight, activation="silu", cu_seqlens=cu_seqlens, plan=plan, cp_context=cp_context)
        return y


class GatedRMSNorm(nn.Module):
    """``x / rms(x) * weight * sigmoid(gate)`` over the last axis, in the gate's dtype; ``weight`` is ``[D]``."""

    def __init__(self, num_channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(num_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Norm x ``[..., D]`` and gate it with ``gate`` of the same shape; the result has the gate's dtype."""
        dtype = gate.dtype
        normed = functional.rms_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps)
        return (normed * gate.sigmoid()).to(dtype)
