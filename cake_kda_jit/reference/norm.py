"""RMS norm with a gate, in plain differentiable torch."""

from torch import Tensor


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate)` over the last axis; x and gate `[..., D]`, weight `[D]`.

    All tensors of one dtype, which is computed in. Raises ValueError for shapes that do not fit.
    """
    if gate.shape != x.shape or weight.shape != x.shape[-1:]:
        given = f"gate {tuple(gate.shape)}, weight {tuple(weight.shape)}"
        raise ValueError(f"expected a gate like x {tuple(x.shape)} and weight {tuple(x.shape[-1:])}; got {given}")
    rms = (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x / rms * weight * gate.sigmoid()
