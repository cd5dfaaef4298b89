"""Input transforms of KDA in plain torch: gate, beta, l2norm, each beside its hand-written backward.

Letters: `x = g_raw + dt_bias`, `a = exp(A_log)`, `s` a sigmoid; HV value heads, K key channels.

    softplus form   g = -a softplus(x)            dx = -a sigmoid(x) dg            dA_log = sum dg g
    bounded form    g = lower_bound sigmoid(a x)  dx = dg lower_bound a s (1 - s)  dA_log = sum dx x
    both            ddt_bias = sum over tokens of dx
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

L2NORM_EPSILON = 1e-6


def gate(g_raw: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None) -> Tensor:
    """Log-decay `g <= 0` from the raw gate, in the dtype and on the device of `g_raw`.

    g_raw `[..., HV, K]`; A_log `[HV]` (None in the bounded form: unit amplitude); dt_bias `[HV*K]` or `[HV, K]` or
    None. Without `lower_bound`: `-exp(A_log) softplus(g_raw + dt_bias)`; with it, in [-5, 0):
    `lower_bound * sigmoid(exp(A_log) (g_raw + dt_bias))`. Natural logarithm. Differentiable in all three tensors.
    Raises ValueError for a bound outside [-5, 0) and for a softplus form without A_log.
    """
    check_gate(A_log, lower_bound)
    x = _shifted(g_raw, dt_bias)
    if lower_bound is None:
        return -_amplitude(A_log, x) * _softplus(x)
    return lower_bound * torch.sigmoid(_amplitude(A_log, x) * x)


def gate_backward(
    g_raw: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    dg: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients `(dg_raw, dA_log, ddt_bias)` of `gate`, written by hand; None for a parameter that is None.

    dg `[..., HV, K]`, the gradient of the log-decay. Results in the dtype of `g_raw`, ddt_bias shaped as dt_bias.
    Finite where the bounded form saturates: there `s (1 - s)` is 0 and the amplitude is kept finite.
    """
    check_gate(A_log, lower_bound)
    x = _shifted(g_raw, dt_bias)
    amplitude = _amplitude(A_log, x)
    if lower_bound is None:
        dx = -amplitude * torch.sigmoid(x) * dg
        # dg * g with the amplitude taken out, so that a g that overflowed to -inf meets no zero.
        dA_log_terms = -dg * _softplus(x) * amplitude
    else:
        inner = amplitude * x
        # sigmoid(-inner) is 1 - s without its cancellation near s = 1.
        dx = dg * lower_bound * torch.sigmoid(inner) * torch.sigmoid(-inner) * amplitude
        dA_log_terms = dx * x
    HV, K = g_raw.shape[-2:]
    dA_log = None if A_log is None else dA_log_terms.reshape(-1, HV, K).sum(dim=(0, 2))
    ddt_bias = None if dt_bias is None else dx.reshape(-1, HV, K).sum(dim=0).reshape(dt_bias.shape)
    return dx, dA_log, ddt_bias


def beta(b: Tensor, *, sigmoid: bool, allow_neg_eigval: bool) -> Tensor:
    """Write strength from its raw form: `b` itself, `sigmoid(b)`, or `2 sigmoid(b)` with `allow_neg_eigval`.

    Any shape; dtype of `b`. Raises ValueError for `allow_neg_eigval` without `sigmoid`, which would mean nothing.
    """
    factor = _beta_factor(sigmoid, allow_neg_eigval)
    return factor * torch.sigmoid(b) if sigmoid else b


def beta_backward(b: Tensor, dbeta: Tensor, *, sigmoid: bool, allow_neg_eigval: bool) -> Tensor:
    """Gradient of the raw `b` of `beta`, written by hand; same shape and dtype as `b`."""
    factor = _beta_factor(sigmoid, allow_neg_eigval)
    return factor * torch.sigmoid(b) * torch.sigmoid(-b) * dbeta if sigmoid else dbeta


def l2norm(x: Tensor) -> Tensor:
    """`x * rsqrt(sum(x^2) + 1e-6)` over the last dimension, in the dtype of `x`."""
    return x * _reciprocal_norm(x)


def l2norm_backward(x: Tensor, dy: Tensor) -> Tensor:
    """Gradient of the input of `l2norm`, written by hand: `rstd (dy - y (dy . y))`."""
    rstd = _reciprocal_norm(x)
    y = x * rstd
    return rstd * (dy - y * (dy * y).sum(dim=-1, keepdim=True))


def check_gate(A_log: Tensor | None, lower_bound: float | None) -> None:
    """Raise ValueError unless the gate arguments name one of the two forms."""
    if lower_bound is None and A_log is None:
        raise ValueError("the softplus gate needs A_log; only the bounded form (lower_bound given) works without it")
    if lower_bound is not None and not -5.0 <= lower_bound < 0.0:
        raise ValueError(f"lower_bound is {lower_bound}; it must lie in [-5, 0)")


def _shifted(g_raw: Tensor, dt_bias: Tensor | None) -> Tensor:
    return g_raw if dt_bias is None else g_raw + dt_bias.to(g_raw.dtype).reshape(g_raw.shape[-2:])


def _amplitude(A_log: Tensor | None, x: Tensor) -> Tensor:
    """`exp(A_log)` as `[HV, 1]`, kept finite: an infinite one would make 0 * inf of a saturated gate's gradient."""
    if A_log is None:
        return torch.ones((), dtype=x.dtype, device=x.device)
    largest = math.floor(math.log(torch.finfo(x.dtype).max))
    return A_log.to(x.dtype).clamp(max=largest).exp().unsqueeze(-1)


def _softplus(x: Tensor) -> Tensor:
    # functional.softplus returns x itself above its threshold, 1e-10 wrong in FP64; logsigmoid is log1p everywhere.
    return -functional.logsigmoid(-x)


def _beta_factor(sigmoid: bool, allow_neg_eigval: bool) -> float:
    if allow_neg_eigval and not sigmoid:
        raise ValueError("allow_neg_eigval doubles sigmoid(beta): it needs use_beta_sigmoid_in_kernel")
    return 2.0 if allow_neg_eigval else 1.0


def _reciprocal_norm(x: Tensor) -> Tensor:
    return (x.square().sum(dim=-1, keepdim=True) + L2NORM_EPSILON).rsqrt()
