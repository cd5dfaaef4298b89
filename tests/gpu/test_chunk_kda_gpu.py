"""chunk_kda forward on a CUDA device against FP64: the pipeline's programs together."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit import chunk_kda, last_launches
from cake_kda_jit.bench.determinism import half_of_the_processors_busy
from cake_kda_jit.bench.problems import NAMES, REGIMES, Problem, make_problem

from .forwards import (
    assert_same_bits,
    assert_within_budget,
    exact,
    forward,
    plan_of,
)

pytestmark = pytest.mark.gpu

LENGTHS = (65, 0, 1, 200, 63, 64, 3)


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
    found = forward(problem, segment_tokens)
    programs = [launched.program for launched in last_launches()]
    assert programs == ["chunk_prepare", "segment_summary", "transfer_walk", "chunk_scan"]
    assert_within_budget(found, exact(problem), problem, "weak")


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("tokens, heads", [(4096, 64), (65_536, 1), (262_144, 1)])
def test_long_documents(tokens, heads, regime, nan_poison):
    """64 heads fill the processors and are scanned whole; one head is cut into segments, up to 128 of them."""
    problem = make_problem((tokens,), regime=regime, heads=heads, head_dim=128)
    if tokens > 65_536 and regime in ("softplus", "correlated"):
        pytest.skip("the longest document takes two regimes: decays that forget, and decays that do not")
    assert_within_budget(forward(problem), exact(problem), problem, regime)


def repeated(problem: Problem, times: int) -> Problem:
    """The pack's tokens repeated, on the device: as many documents more."""
    inputs = {name: tensor.repeat(1, times, *[1] * (tensor.dim() - 2)) for name, tensor in problem.inputs.items()}
    tokens = problem.inputs["q"].shape[1]
    return Problem(inputs, problem.keywords, torch.arange(times + 1) * tokens)


def test_more_elements_than_31_bits_count():
    """T HV K above 2^31: every copy of a document has the bits of the one that is alone."""
    problem = make_problem((2048,), heads=64, head_dim=128, with_state=False).to("cuda")
    times = 2**31 // (2048 * 64 * 128) + 1
    whole = repeated(problem, times)
    assert whole.inputs["v"].numel() > 2**31
    alone = forward(problem)
    found = forward(whole)
    for name, shape in (("o", (times, 2048, 64, 128)), ("final_state", (times, 64, 128, 128))):
        copies = found[name].view(shape)
        for copy in (0, 1, times // 2, times - 2, times - 1):
            assert torch.equal(copies[copy], alone[name][0]), (name, copy)
        assert all(torch.equal(copies[copy], copies[0]) for copy in range(times)), name


@pytest.mark.parametrize("segment_tokens", [0, 128])
def test_30_runs_in_poisoned_memory_give_identical_bytes(segment_tokens, nan_poison):
    """Alone, and beside a kernel that holds half of the processors: what runs beside what changes no byte."""
    problem = make_problem((700, 0, 1, 300), heads=8, value_heads=16, head_dim=128)
    first = forward(problem, segment_tokens)
    for _ in range(30):
        assert_same_bits(forward(problem, segment_tokens), first)
    with half_of_the_processors_busy() as occupy:
        for _ in range(30):
            occupy()
            assert_same_bits(forward(problem, segment_tokens), first)


def test_neighbours_change_no_bit(nan_poison):
    """A document in the middle of a pack has the bits of its own run."""
    problem = make_problem((100, 300, 40), head_dim=128)
    whole = forward(problem)
    inputs = {name: tensor[:, 100:400] for name, tensor in problem.inputs.items()}
    state = problem.keywords["initial_state"][1:2]
    alone = forward(Problem(inputs, problem.keywords | {"initial_state": state}, torch.tensor([0, 300])))
    assert torch.equal(alone["o"], whole["o"][:, 100:400])
    assert torch.equal(alone["final_state"][0], whole["final_state"][1])


@pytest.mark.parametrize("segment_tokens", [0, 64])
def test_a_cuda_graph_of_a_forward_with_a_plan(segment_tokens, nan_poison):
    """Captured once, replayed on other values in the same memory: the bits of an ordinary call."""
    problem, other = (make_problem((200, 70), head_dim=128, seed=seed).to("cuda") for seed in (0, 1))
    plan = plan_of(problem, segment_tokens=segment_tokens)
    forward(problem, plan=plan)  # loads the kernels: nothing may be loaded inside a capture
    tensors = [problem.inputs[name] for name in NAMES]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        o, final_state = chunk_kda(*tensors, plan=plan, output_final_state=True, **problem.keywords)
    for given in (other, make_problem((200, 70), head_dim=128, seed=2).to("cuda")):
        for name, tensor in problem.inputs.items():
            tensor.copy_(given.inputs[name])
        graph.replay()
        expected = forward(Problem(given.inputs, problem.keywords, given.cu_seqlens), plan=plan)
        assert_same_bits({"o": o, "final_state": final_state}, expected)


def test_no_synchronisation_with_a_plan():
    problem = make_problem((100, 300), head_dim=128).to("cuda")
    plan = plan_of(problem)
    arguments = [problem.inputs[name] for name in NAMES]
    chunk_kda(*arguments, plan=plan, **problem.keywords)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        chunk_kda(*arguments, plan=plan, **problem.keywords)
    finally:
        torch.cuda.set_sync_debug_mode("default")
