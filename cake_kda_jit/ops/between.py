"""What a layer does between its projections as one prepared call: convolutions, attention, norm and gate."""

from __future__ import annotations

import torch

from . import checks
from .calls import find_call, key_of, make_call
from .inputs import transforms_of
from .operations import Attention, BetweenProjections
from .plan import BatchTables, Plan, tables_of_batch
from .problem import KdaOptions, resolve_options


def between_projections(
    tensors: tuple[torch.Tensor, ...],
    head_dim: int,
    eps: float,
    *,
    plan: Plan | None,
    lower_bound: float | None,
    allow_neg_eigval: bool,
    options: KdaOptions | None,
) -> torch.Tensor | None:
    """Return y ``[B, T, HV * V]`` of the tensors of ``BetweenProjections`` up to the norm's.

    Without a plan there are B documents. q and k are normed, the gate and beta's sigmoid applied. Only in eager mode.
    Returns None where there is no token, where the operations one by one would copy a tensor, where the norm's gate has
    another dtype than what becomes v, and where a convolution's weight is not ``[D, 1, W]``: call them. Errors are
    those of ``causal_conv1d``, ``chunk_kda`` and ``gated_rms_norm``.
    """
    key = key_of(BetweenProjections.name, plan, tensors, head_dim, eps, lower_bound, allow_neg_eigval, options)
    call = find_call(key)
    if call is not None:
        pack = plan or _batch(tensors, head_dim)
        return call(*tensors, *pack.tables, pack.cu_seqlens)[0]
    if tensors[10].dtype != tensors[2].dtype or any(weight.dim() != 3 for weight in tensors[3:6]):
        return None
    pack = _checked(tensors, head_dim, eps, lower_bound, plan)
    transforms = transforms_of(head_dim, None, lower_bound, True, True, True, allow_neg_eigval)
    attention = Attention(pack.num_summaries, pack.has_spare_rows, transforms, resolve_options(options))
    operands = (*tensors, *pack.tables, pack.cu_seqlens)
    call = make_call(key, BetweenProjections(attention, float(eps)), tensors, operands)
    return None if call is None else call(*operands)[0]


def _batch(tensors: tuple[torch.Tensor, ...], head_dim: int) -> BatchTables:
    values, beta = tensors[2], tensors[7]
    return tables_of_batch(*values.shape[:2], beta.shape[-1], head_dim, values.device)


def _checked(
    tensors: tuple[torch.Tensor, ...], head_dim: int, eps: float, lower_bound: float | None, plan: Plan | None
) -> Plan | BatchTables:
    """Return the plan, or the tables of a batch; raises as the operations one by one do."""
    rows, weights, (decay, beta, A_log, dt_bias, gate, norm_weight) = tensors[:3], tensors[3:6], tensors[6:]
    for x, weight in zip(rows, weights):
        checks.check_convolution(x, weight.detach().squeeze(1), None)
    q, k, v, g = (one.detach().unflatten(-1, (-1, head_dim)) for one in (*rows, decay))
    checks.check_attention_shapes(q, k, v, g, beta)
    checks.check_gate(True, lower_bound, A_log, dt_bias, v)
    checks.check_gated_norm(v, gate, norm_weight, eps)
    return checks.plan_for(q, v, None, None, plan)
