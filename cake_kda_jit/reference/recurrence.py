"""The definition of Kimi Delta Attention, token by token, in plain differentiable torch.

    S <- diag(exp(g_t)) S ;  u = beta_t (v_t - S^T k_t) ;  S <- S + k_t u^T ;  o_t = scale S^T q_t

Every other implementation is measured against this one, so it has no chunk, no cumulated gate and no inverse.
"""

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .inputs import KdaKeywords, Ranges, make_problem

# Autograd keeps about three states a token. Where all of them hold more elements than this, only the states between
# stretches of so many steps are kept, and the steps are run again in the backward.
RECOMPUTE_ABOVE = 2**23
STRETCH = 32


def recurrent_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **keywords) -> tuple[Tensor, Tensor]:
    """Outputs and final states of KDA by its recurrence: the definition.

    q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g `[B, T, HV, K]` (natural log-decay, or raw with `use_gate_in_kernel`),
    beta `[B, T, HV]`; `keywords` are the fields of `KdaKeywords`, all optional and named as in `chunk_kda`: scale,
    initial_state, cu_seqlens (then B = 1), use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
    allow_neg_eigval, safe_gate, lower_bound, A_log, dt_bias, state_v_first, dtype.

    Returns `(o [B, T, HV, V], final_state [N, HV, K, V])` in the dtype computed in; an empty document's final state is
    its initial state. `g = -inf` is a hard reset. Every gradient comes from autograd and has its tensor's dtype: pass
    FP64 tensors, not `dtype=torch.float64` alone, where gradients must be exact.
    Raises TypeError for an unknown keyword, ValueError for shapes that do not fit.
    """
    problem = make_problem(q, k, v, g, beta, KdaKeywords(**keywords))
    order, rows, running = _time_major(problem.documents, v.device)
    streams = (problem.q, problem.k, problem.v, problem.g.exp(), problem.beta)
    # One gather and one split for the whole pack: their backward is linear in the tokens, an index per step is not.
    steps = list(zip(*(x[rows].split(running) for x in streams))) if running else []

    S = problem.initial_state[order]
    advance = _advance
    if len(rows) * S.shape[1:].numel() > RECOMPUTE_ABOVE:
        advance = partial(checkpoint, _advance, use_reentrant=False, preserve_rng_state=False)
    outputs, ended = [problem.v[:0]], []
    for begin in range(0, len(steps), STRETCH):
        stretch = steps[begin : begin + STRETCH]
        S, o, ended_here = advance(S, stretch)
        outputs.append(o)
        ended += ended_here
    # The documents run longest first, so those that ended last come before those that ended earlier.
    final_state = torch.cat([S, *reversed(ended)])[order.argsort()]
    o = problem.scale * torch.cat(outputs)[rows.argsort()]
    return o.reshape(v.shape), problem.swap_state(final_state)


def _time_major(documents: Ranges, device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """All documents side by side: their order, longest first; token rows step by step; documents running per step."""
    bounds = torch.tensor(documents, dtype=torch.long).reshape(-1, 2)
    lengths, order = (bounds[:, 1] - bounds[:, 0]).sort(descending=True, stable=True)
    step = torch.arange(int(lengths.max()) if len(documents) else 0).unsqueeze(-1)
    alive = step < lengths
    rows = (bounds[order, 0] + step)[alive]
    return order.to(device), rows.to(device), alive.sum(dim=1).tolist()


def _advance(S: Tensor, steps: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The recurrence over some steps: state, unscaled outputs, and the final states of documents that ended."""
    outputs, ended = [], []
    for q, k, v, decay, beta in steps:
        running = q.shape[0]
        if running < S.shape[0]:
            ended.append(S[running:])
            S = S[:running]
        S = decay.unsqueeze(-1) * S
        u = beta.unsqueeze(-1) * (v - _read(S, k))
        S = S + k.unsqueeze(-1) * u.unsqueeze(-2)
        outputs.append(_read(S, q))
    return S, torch.cat(outputs), ended


def _read(S: Tensor, x: Tensor) -> Tensor:
    """`S^T x` for S `[n, HV, K, V]` and x `[n, HV, K]`."""
    return (x.unsqueeze(-2) @ S).squeeze(-2)
