"""The torch.library operators: schema, fakes, autograd registration, and tracing, by opcheck."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit import causal_conv1d, chunk_kda, make_plan, transfer_walk
from cake_kda_jit.bench.problems import make_problem

assert chunk_kda and causal_conv1d and transfer_walk  # importing them registers the operators


@pytest.mark.parametrize("backward", ["saved", "replay", None])
@pytest.mark.parametrize("optional", [True, False])
def test_attention_forward(optional, backward):
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
    tables = (plan.chunk_table, plan.segment_table, plan.summary_offsets, plan.num_summaries)
    transforms = (0.125, -5.0, True, *(("bounded", "sigmoid") if optional else ("ready", "ready")))
    options = (backward or "saved", 64, None, None)
    arguments = (*inputs, *extra, *tables, *transforms, *options, optional, backward is not None)
    checks = ("test_schema", "test_faketensor") if backward is None else None
    torch.library.opcheck(
        torch.ops.cake_kda_jit.chunk_kda_forward, arguments, **({"test_utils": checks} if checks else {})
    )


@pytest.mark.parametrize("with_state", [True, False])
def test_conv_forward(with_state):
    x = torch.randn(20, 8, requires_grad=True)
    weight = torch.randn(8, 4, requires_grad=True)
    bias, state = (
        (torch.randn(8, requires_grad=True), torch.randn(2, 8, 3, requires_grad=True)) if with_state else (None, None)
    )
    arguments = (x, weight, bias, state, torch.tensor([0, 12, 20]), True, with_state)
    torch.library.opcheck(torch.ops.cake_kda_jit.causal_conv1d_forward, arguments)


def test_transfer_walk():
    M, B = torch.randn(3, 1, 64, 64) / 64, torch.randn(3, 1, 64, 64)
    arguments = (M, B, torch.randn(2, 1, 64, 64), torch.tensor([0, 1, 3]), None, 0, False)
    torch.library.opcheck(torch.ops.cake_kda_jit.transfer_walk, arguments)
