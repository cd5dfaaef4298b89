"""The torch.library operators: schema, fakes, autograd registration, and tracing, by opcheck."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit import causal_conv1d, chunk_kda, make_plan, transfer_walk
from cake_kda_jit.bench.problems import make_problem

assert chunk_kda and causal_conv1d and transfer_walk  # importing them registers the operators


@pytest.mark.parametrize(
    "backward, keep_decayed_qk", [("saved", False), ("saved", True), ("replay", False), (None, False)]
)
@pytest.mark.parametrize("optional", [True, False])
def test_attention_forward(optional, backward, keep_decayed_qk):
    """In segments, with gate parameters and states or ready inputs; keeping nothing, or for either backward."""
    problem = make_problem((140, 0, 25))
    plan = make_plan(problem.cu_seqlens, num_heads=2, head_dim=64, device="cpu", segment_tokens=64)
    inputs = [tensor[0].requires_grad_() for tensor in problem.inputs.values()]
    extra = [None] * 3
    if optional:
        A_log, dt_bias, state = (problem.keywords[name] for name in ("A_log", "dt_bias", "initial_state"))
        extra = [A_log.requires_grad_(), dt_bias.view(2, 64).requires_grad_(), state.requires_grad_()]
    else:
        inputs[3] = (-inputs[3].detach().float().abs()).requires_grad_()
    tables = (plan.chunk_table, plan.segment_table, plan.summary_offsets, plan.num_summaries, False)
    transforms = (0.125, -5.0, True, *(("bounded", "sigmoid") if optional else ("ready", "ready")))
    options = (backward or "saved", 64, None, None, keep_decayed_qk)
    arguments = (*inputs, *extra, *tables, *transforms, *options, optional, backward is not None)
    checks = ("test_schema", "test_faketensor") if backward is None else None
    torch.library.opcheck(
        torch.ops.cake_kda_jit.chunk_kda_forward, arguments, **({"test_utils": checks} if checks else {})
    )


@pytest.mark.parametrize("with_state", [True, False])
def test_conv_forward(with_state):
    """With spare rows behind the last document, or with none."""
    x = torch.randn(20 + 5 * with_state, 8, requires_grad=True)
    weight = torch.randn(8, 4, requires_grad=True)
    bias, state = (
        (torch.randn(8, requires_grad=True), torch.randn(2, 8, 3, requires_grad=True)) if with_state else (None, None)
    )
    arguments = (x, weight, bias, state, torch.tensor([0, 12, 20]), with_state, True, with_state)
    torch.library.opcheck(torch.ops.cake_kda_jit.causal_conv1d_forward, arguments)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_batch_whose_rows_are_joined_or_copied(order):
    """Operators take [B, T, ...]; where the strides forbid to count B and T as one, they copy: the same values."""
    problem = make_problem(None, batch=(2, 70), with_state=False)
    plain = [tensor.requires_grad_() for tensor in problem.inputs.values()]
    strided = [t.detach().transpose(*order).contiguous().transpose(*order).requires_grad_() for t in plain]
    tables = torch.ops.cake_kda_jit.pack_tables(torch.tensor([0, 70, 140]), 4, 2, 0, 0)
    A_log, dt_bias = (problem.keywords[name] for name in ("A_log", "dt_bias"))
    transforms, options = (0.125, -5.0, True, "bounded", "sigmoid"), ("saved", 64, None, None, False)
    rest = (A_log, dt_bias, None, *tables, 0, False, *transforms, *options)
    results = []
    for inputs in (plain, strided):
        o, *_ = torch.ops.cake_kda_jit.chunk_kda_forward(*inputs, *rest, False, True)
        results.append((o, *torch.autograd.grad(o.float().square().sum(), inputs)))
    assert all(torch.equal(one, other) for one, other in zip(*results))
    torch.library.opcheck(torch.ops.cake_kda_jit.chunk_kda_forward, (*strided, *rest, False, True))


@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_gated_norm_forward(weight_dtype, is_flat):
    """With the gate's heads and channels as one dimension, or as two."""
    x = torch.randn(2, 5, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    gate = torch.randn(2, 5, *((192,) if is_flat else (3, 64)), dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(64, dtype=weight_dtype, requires_grad=True)
    torch.library.opcheck(torch.ops.cake_kda_jit.gated_rms_norm_forward, (x, gate, weight, 1e-5))


def test_pack_tables():
    arguments = (torch.tensor([0, 70, 200]), 5, 5, 64, 65)
    torch.library.opcheck(torch.ops.cake_kda_jit.pack_tables, arguments)


def test_transfer_walk():
    M, B = torch.randn(3, 1, 64, 64) / 64, torch.randn(3, 1, 64, 64)
    arguments = (M, B, torch.randn(2, 1, 64, 64), torch.tensor([0, 1, 3]), None, 0, False)
    torch.library.opcheck(torch.ops.cake_kda_jit.transfer_walk, arguments)
