"""What a layer does between its projections as one prepared call: convolutions, attention, norm and gate."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import checks
from .calls import find_call, make_call
from .inputs import transforms_of
from .operations import Attention, BetweenProjections
from .plan import BatchTables, Plan, tables_of_batch
from .problem import KdaOptions, resolve_options


class LayerForm(NamedTuple):
    """What a layer says of its attention beside its tensors, as ``chunk_kda`` takes it; ``eps`` is its norm's.

    q and k are normed, the gate and beta's sigmoid applied.
    """

    head_dim: int
    eps: float
    lower_bound: float | None
    allow_neg_eigval: bool


def between_projections(
    tensors: tuple[torch.Tensor, ...], form: LayerForm, *, plan: Plan | None, options: KdaOptions | None
) -> torch.Tensor | None:
    """Return y ``[B, T, HV * V]`` of the tensors of ``BetweenProjections`` up to the norm's.

    Without a plan there are B documents. Only in eager mode. Returns None where there is no token, where the operations
    one by one would copy a tensor, and for what ``checked_operation`` leaves to them: call them. Errors are those of
    ``causal_conv1d``, ``chunk_kda`` and ``gated_rms_norm``.
    """
    asked = (BetweenProjections.name, plan, tensors, form, options)
    call = find_call(*asked)
    if call is not None:
        pack = plan or _batch_tables(tensors, form.head_dim)
        return call(*tensors, *pack.tables, pack.cu_seqlens)[0]
    checked = checked_operation(tensors, form, plan, options)
    if checked is None:
        return None
    operation, pack = checked
    operands = (*tensors, *pack.tables, pack.cu_seqlens)
    call = make_call(asked, operation, operands)
    return None if call is None else call(*operands)[0]


def _batch_tables(tensors: tuple[torch.Tensor, ...], head_dim: int) -> BatchTables:
    """Return the tables of B documents of T tokens."""
    values, beta = tensors[2], tensors[7]
    return tables_of_batch(*values.shape[:2], beta.shape[-1], head_dim, values.device)


def checked_operation(
    tensors: tuple[torch.Tensor, ...], form: LayerForm, plan: Plan | None, options: KdaOptions | None
) -> tuple[BetweenProjections, Plan | BatchTables] | None:
    """Return the operation on tensors, and the plan or a batch's tables; raises as the operations one by one do.

    Returns None where the norm's gate has another dtype than what becomes v, and where a convolution's weight is not
    ``[D, 1, W]``.
    """
    rows, weights, (decay, beta, A_log, dt_bias, gate, norm_weight) = tensors[:3], tensors[3:6], tensors[6:]
    if gate.dtype != rows[2].dtype or any(weight.dim() != 3 for weight in weights):
        return None
    for x, weight in zip(rows, weights):
        checks.check_convolution(x, weight.detach().squeeze(1), None)
    q, k, v, g = (one.detach().unflatten(-1, (-1, form.head_dim)) for one in (*rows, decay))
    checks.check_attention_shapes(q, k, v, g, beta)
    checks.check_gate(True, form.lower_bound, A_log, dt_bias, v)
    checks.check_gated_norm(v, gate, norm_weight, form.eps)
    pack = checks.plan_for(q, v, None, None, plan)
    transforms = transforms_of(form.head_dim, None, form.lower_bound, True, True, True, form.allow_neg_eigval)
    attention = Attention(pack.num_summaries, pack.has_spare_rows, transforms, resolve_options(options))
    return BetweenProjections(attention, float(form.eps)), pack
