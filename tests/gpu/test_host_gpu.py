"""Host time on a CUDA device, from a call to its return, counted in ``torch.empty`` of the same minute.

The hosts of one kind of device differ by a factor of two from one run to the next, and all that is counted here with
them. Where ``torch.empty`` takes 3.6 us, a forward of 14 is 50. What bounds these times, and why a layer's bound is not
lower, is in docs/decisions/0013-prepared-calls.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from cake_kda_jit import causal_conv1d, chunk_kda, make_plan
from cake_kda_jit.bench.host_graphs import GraphedLayer
from cake_kda_jit.bench.problems import NAMES, make_problem
from cake_kda_jit.layers import KimiDeltaAttention

pytestmark = pytest.mark.gpu

HEADS, HEAD_DIM, TOKENS = 1, 128, 64


def best(call: Callable[[], object], burst: int = 10, runs: int = 40) -> float:
    """Microseconds per call in the best burst: other processes only add. Each burst begins with an idle device."""
    spans = []
    for _ in range(runs):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(burst):
            call()
        spans.append((time.perf_counter() - began) / burst)
    torch.cuda.synchronize()
    return 1e6 * min(spans)


def in_allocations(call: Callable[[], object]) -> float:
    allocation = best(lambda: torch.empty((1, 64, 1, 128), dtype=torch.bfloat16, device="cuda"))
    spent = best(call)
    print(f"{spent:.1f} us, torch.empty {allocation:.1f} us: {spent / allocation:.1f}")
    return spent / allocation


@pytest.fixture(scope="module")
def plan():
    return make_plan(torch.tensor([0, TOKENS]), num_heads=HEADS, head_dim=HEAD_DIM, device="cuda")


def test_a_forward(plan):
    """Two launches and two allocations are half of it; 10 to 14.7 were measured, the most beside eight other tests."""
    problem = make_problem((TOKENS,), heads=HEADS, head_dim=HEAD_DIM, with_state=False).to("cuda")
    arguments = [problem.inputs[name] for name in NAMES]
    with torch.no_grad():
        assert in_allocations(lambda: chunk_kda(*arguments, plan=plan, **problem.keywords)) <= 18


def test_a_forward_with_its_node_of_autograd(plan):
    """A node that does nothing takes 3 of it; 15 to 18 were measured."""
    problem = make_problem((TOKENS,), heads=HEADS, head_dim=HEAD_DIM, with_state=False).to("cuda")
    leaves = [problem.inputs[name].requires_grad_() for name in NAMES]
    assert in_allocations(lambda: chunk_kda(*leaves, plan=plan, **problem.keywords)) <= 21


def test_a_convolution(plan):
    """4.9 to 6 were measured."""
    x = torch.randn(1, TOKENS, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(128, 4, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        assert in_allocations(lambda: causal_conv1d(x, weight, plan=plan)) <= 8


def test_a_layer_between_its_projections(plan):
    """Convolutions, attention, norm and gate in one call; 19 to 26 were measured, 37 to 40 when torch had the norm."""
    layer = KimiDeltaAttention(128, HEADS, HEAD_DIM).to("cuda", torch.bfloat16)
    rows = torch.randn(1, TOKENS, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    beta = torch.randn(1, TOKENS, HEADS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    given = (*[rows] * 4, beta, layer.A_log, layer.dt_bias, rows)
    assert in_allocations(lambda: layer.between_projections(given, is_plain=True, plan=plan)) <= 32


def test_a_graphed_layer(graphs_collected):
    """The copy of its input, a node of autograd and the replay; 7.4 to 12.1 were measured."""
    layer = KimiDeltaAttention(128, HEADS, HEAD_DIM).to("cuda", torch.bfloat16)
    sizes = {"num_heads": HEADS, "head_dim": HEAD_DIM, "device": "cuda"}
    plan = make_plan(torch.tensor([0, TOKENS]), **sizes, max_documents=1, max_tokens=TOKENS)
    x, other = (torch.randn(1, TOKENS, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    boundaries = plan.cu_seqlens.clone()
    graphed = GraphedLayer(layer, plan, x, boundaries)
    assert in_allocations(lambda: graphed(other, boundaries)) <= 16
