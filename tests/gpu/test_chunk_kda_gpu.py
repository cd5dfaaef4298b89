"""chunk_kda forward on a CUDA device against the FP64 recurrence: the pipeline's programs together."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit import chunk_kda, last_launches, make_plan
from cake_kda_jit.bench.problems import (
    BUDGETS,
    LOCAL_FACTOR,
    NAMES,
    REGIMES,
    local_errors,
    make_problem,
    relative_error,
)
from cake_kda_jit.reference import recurrent_kda

pytestmark = pytest.mark.gpu

LENGTHS = (65, 0, 1, 200, 63, 64, 3)


def forward(problem, **extra):
    """The forward on the device, as CPU tensors by name."""
    moved = problem.to("cuda")
    with torch.no_grad():
        o, final_state = chunk_kda(
            *(moved.inputs[name] for name in NAMES),
            output_final_state=True,
            **{"cu_seqlens": moved.cu_seqlens, **moved.keywords, **extra},
        )
    return {"o": o.cpu(), "final_state": final_state.cpu()}


def exact(problem):
    inputs = [problem.inputs[name].double() for name in NAMES]
    keywords = {
        name: value.double() if isinstance(value, torch.Tensor) else value for name, value in problem.keywords.items()
    }
    o, final_state = recurrent_kda(*inputs, cu_seqlens=problem.cu_seqlens, **keywords)
    return {"o": o, "final_state": final_state}


def assert_within_budget(found, expected, problem, regime):
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), name
        assert relative_error(tensor, expected[name]) <= BUDGETS[regime][name], name
        for document, head, error in local_errors(name, tensor, expected[name], problem):
            assert error <= LOCAL_FACTOR * BUDGETS[regime][name], (name, document, head)


@pytest.mark.parametrize("head_dim, dtype", [(64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16)])
@pytest.mark.parametrize("regime", REGIMES)
def test_packed_documents(regime, head_dim, dtype, nan_poison):
    problem = make_problem(LENGTHS, regime=regime, head_dim=head_dim, dtype=dtype)
    assert_within_budget(forward(problem), exact(problem), problem, regime)


@pytest.mark.parametrize("value_heads", [2, 4, 8])
def test_grouped_value_heads_in_a_batch(value_heads, nan_poison):
    problem = make_problem(None, batch=(2, 100), heads=2, value_heads=value_heads)
    assert_within_budget(forward(problem), exact(problem), problem, "bounded")


@pytest.mark.parametrize("segment_tokens", [64, 192])
@pytest.mark.parametrize("with_state", [True, False])
def test_segments(segment_tokens, with_state, nan_poison):
    problem = make_problem((700, 30, 0, 200), regime="weak", head_dim=128, with_state=with_state)
    plan = make_plan(problem.cu_seqlens, num_heads=2, head_dim=128, device="cuda", segment_tokens=segment_tokens)
    found = forward(problem, plan=plan)
    assert_within_budget(found, exact(problem), problem, "weak")
    programs = [launched.program for launched in last_launches()]
    assert programs == ["chunk_prepare", "segment_summary", "transfer_walk", "chunk_scan"]


def test_runs_and_neighbours_change_no_bit(nan_poison):
    problem = make_problem((100, 300, 40), with_state=False, head_dim=128)
    first = forward(problem)
    for _ in range(10):
        again = forward(problem)
        assert all(torch.equal(first[name], again[name]) for name in first)
    alone = make_problem((300,), with_state=False, head_dim=128)
    alone.inputs = {name: tensor[:, 100:400] for name, tensor in problem.inputs.items()}
    alone.keywords = problem.keywords
    assert torch.equal(forward(alone)["o"], first["o"][:, 100:400])


def test_no_synchronisation_with_a_plan():
    problem = make_problem((100, 300), head_dim=128).to("cuda")
    plan = make_plan(problem.cu_seqlens, num_heads=2, head_dim=128, device="cuda")
    arguments = [problem.inputs[name] for name in NAMES]
    chunk_kda(*arguments, plan=plan, **problem.keywords)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        chunk_kda(*arguments, plan=plan, **problem.keywords)
    finally:
        torch.cuda.set_sync_debug_mode("default")
