"""The two small modules around the attention kernels, a short causal convolution and a gated norm, and how they run."""

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
        """Norm x ``[..., D]`` and gate it with ``gate`` of the same shape, or with the last two dimensions as one.

        The result has the gate's dtype and shape.
        """
        dtype, weight = gate.dtype, self.weight
        if x.dtype != dtype:
            x = x.to(dtype)
        if weight.dtype != dtype:
            weight = weight.to(dtype)
        normed = functional.rms_norm(x, weight.shape, weight, self.eps)
        if gate.dim() < x.dim():
            normed = normed.flatten(-2)
        gated = normed * gate.sigmoid()
        return gated if gated.dtype == dtype else gated.to(dtype)  # autocast may norm in fp32


_PARAMETERS = {nn.Linear: {"weight", "bias"}, ShortConvolution: {"weight"}}


def is_bare(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether to call a module is to call the forward of ``kind`` on its parameters: no hooks, nothing else in place.

    ``kind`` is a key of ``_PARAMETERS``. A weight may also be a plain attribute, which only the module itself finds.
    """
    own = module.__dict__
    return (
        type(module) is kind
        and own["_parameters"].keys() == _PARAMETERS[kind]
        and not (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
            or "_compiled_call_impl" in own
            or torch.nn.modules.module._has_any_global_hook()
        )
    )


def project(linear: nn.Module, x: Tensor) -> Tensor:
    """Call a projection. What ``nn.Module`` does around a bare ``nn.Linear`` takes the host as long as its launch.

    Only in eager mode: a compiler sees modules and their hooks itself.
    """
    if is_bare(linear, nn.Linear):
        parameters = linear._parameters
        return functional.linear(x, parameters["weight"], parameters["bias"])
    return linear(x)
