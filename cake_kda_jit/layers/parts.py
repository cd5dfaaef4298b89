"""The two small modules around the attention kernels: a short causal convolution and a gated norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.api import causal_conv1d
from ..ops.plan import Plan


class ShortConvolution(nn.Module):
    """Causal depthwise convolution and SiLU; documents never mix.

    ``weight`` is ``[D, 1, W]``, laid out and initialised like ``nn.Conv1d``'s: the last tap meets the current token.
    W is 2 to 4.
    """

    def __init__(self, num_channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, 1, width))
        bound = width**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, plan: Plan | None = None) -> Tensor:
        """Convolve x ``[B, T, D]``; same shape and dtype. Documents as in ``causal_conv1d``."""
        return causal_conv1d(x, self.weight.squeeze(1), activation="silu", cu_seqlens=cu_seqlens, plan=plan)[0]


class GatedRMSNorm(nn.Module):
    """``x / rms(x) * weight * sigmoid(gate)`` over the last axis, computed in fp32; ``weight`` is ``[D]``."""

    def __init__(self, num_channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_channels))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Norm x ``[..., D]`` and gate it with ``gate`` of the same shape; the result has the gate's dtype."""
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float() * gate.float().sigmoid()).to(gate.dtype)
