"""The gated norm of a layer as one prepared call, differentiable in x, gate and weight."""

from __future__ import annotations

import torch

from . import checks
from .calls import find_call, is_eager, make_call
from .library import normalize
from .operations import GatedNorm


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / rms(x) * weight * sigmoid(gate)`` over the last axis, computed in fp32, in the gate's shape.

    x ``[T, HV, D]`` or ``[B, T, HV, D]`` with D 64 or 128; gate of x's shape, or with the last two dimensions as one;
    weight ``[D]``. x and gate share bf16, fp16 or fp32; weight has one of these. Raises UnsupportedProblemError before
    any launch.
    """
    given = (x, gate, weight)
    asked = None
    if is_eager():
        asked = (GatedNorm.name, None, given, eps)
        call = find_call(*asked)
        if call is not None:
            return call(*given)[0]
    checks.check_gated_norm(x, gate, weight, eps)
    checks.check_no_transform(GatedNorm.name, *given)
    operation = GatedNorm(float(eps))
    tensors = (x, gate, weight.contiguous())
    call = make_call(asked, operation, tensors)
    return normalize(operation, tensors) if call is None else call(*tensors)[0]
