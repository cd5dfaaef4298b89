"""The two small modules around the attention kernels, a short causal convolution and a gated norm, and how they run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops.api import causal_conv1d
from ..ops.calls import is_eager
from ..ops.gated import gated_rms_norm
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
    """``x / rms(x) * weight * sigmoid(gate)`` over the last axis, in the gate's dtype; ``weight`` is ``[D]``.

    D is 64 or 128. Computed in fp32 and rounded once.
    """

    def __init__(self, num_channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(num_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Norm x ``[T, HV, D]`` or ``[B, T, HV, D]`` and gate it.

        ``gate`` has the same shape, or the last two dimensions as one. The result has its dtype and shape.
        """
        return gated_rms_norm(x if x.dtype == gate.dtype else x.to(gate.dtype), gate, self.weight, self.eps)


def calls_are_plain() -> bool:
    """Whether to call a bare module is to run what its kind's forward was when this was imported.

    It is in eager mode, without hooks on all modules, and as long as nobody has put another function in a class.
    """
    return is_eager() and not _has_global_hooks() and all([kind.forward is own for kind, own in _FORWARDS])


_FORWARDS = tuple((kind, kind.forward) for kind in (nn.Linear, ShortConvolution, GatedRMSNorm))


def _has_global_hooks() -> bool:
    module = torch.nn.modules.module  # torch 2.6 has no function that says it
    return bool(
        module._global_backward_pre_hooks
        or module._global_backward_hooks
        or module._global_forward_pre_hooks
        or module._global_forward_hooks
    )


def bare_parameters(
    modules: Mapping[str, nn.Module | None], kinds: Iterable[tuple[str, type[nn.Module]]]
) -> tuple[list[Tensor], dict[str, Tensor]] | None:
    """Return weights of modules, and biases by name, if to call any is to call the forward of its kind with these.

    None if one is of another class or has hooks, if something else stands in its forward's place, and if its weight, or
    an ``nn.Linear``'s bias, is no parameter but a plain attribute, or has gone.
    """
    weights, biases = [], {}
    for name, kind in kinds:
        module = modules.get(name)
        if type(module) is not kind:
            return None
        own = module.__dict__
        parameters = own["_parameters"]
        weight = parameters.get("weight")
        if (
            weight is None
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
            or "_compiled_call_impl" in own
            or (kind is nn.Linear and "bias" not in parameters)
        ):
            return None
        weights.append(weight)
        bias = parameters.get("bias")
        if bias is not None:
            biases[name] = bias
    return weights, biases


def project(modules: Mapping[str, nn.Module], name: str, x: Tensor) -> Tensor:
    """Call a projection. What ``nn.Module`` does around a bare ``nn.Linear`` takes the host as long as its launch.

    Only where ``calls_are_plain``: a compiler sees modules and their hooks itself.
    """
    found = bare_parameters(modules, ((name, nn.Linear),))
    if found is None:
        return modules[name](x)
    [weight], biases = found
    return functional.linear(x, weight, biases.get(name))


def call(modules: Mapping[str, nn.Module], name: str, x: Tensor) -> Tensor:
    """Call a projection as a module."""
    return modules[name](x)
