"""Cases of convolution and context parallel from public reports. docs/cases-parallel.md names each test's report."""

from __future__ import annotations

import math

import pytest
import torch

from cake_kda_jit import KcpOptions, Partition, UnsupportedProblemError, causal_conv1d, chunk_kda, transfer_walk
from cake_kda_jit.bench import problems
from cake_kda_jit.bench.problems import PARAMETER_BUDGET, make_problem, relative_error
from cake_kda_jit.reference import causal_conv1d_reference

from ..cp.ranks import (
    LAYOUTS,
    assert_same_bits,
    attention,
    boundaries,
    conv_call,
    conv_problem,
    convolution,
    run_ranks,
)
from .attention import assert_within_budgets

pytestmark = pytest.mark.usefixtures("nan_poison")

# fp32 sums of at most 4 products a token, and of all tokens for weights: a few ulps of 6e-8, with room for cancelling.
FP32_CONV = 2e-6
# Products of up to 64 decays of 1e-7 each, and sums of 64 terms.
FP32_ATTENTION = 2e-5


def conv_reference(problem):
    def call(cu_seqlens, **tensors):
        return causal_conv1d_reference(cu_seqlens=cu_seqlens, **tensors)

    return conv_call(problem, call, dtype=torch.float64)


def assert_conv_near(found, problem) -> None:
    for name, tensor in conv_reference(problem).items():
        assert torch.isfinite(found[name]).all(), name
        assert (found[name].double() - tensor).norm() <= FP32_CONV * max(1.0, tensor.norm().item()), name


# ---- convolution -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_documents_of_1_2_and_3_tokens_with_state_and_its_gradient(world_size):
    """Shorter than W - 1 tokens: the final state is partly the initial one, and so is its gradient; also on ranks."""
    cu = boundaries([1, 2, 3, 1, 3])
    problem = conv_problem(cu, width=4)
    assert_conv_near(conv_call(problem, output_final_state=True), problem)
    for partition in (
        Partition.per_document_zigzag(cu, world_size),
        Partition.from_fragments(cu, [(token % world_size, token, token + 1) for token in range(cu[-1])], world_size),
    ):
        assert_conv_near(convolution(problem, partition).whole, problem)


def test_a_batch_is_refused_where_documents_are_packed():
    x, weight = torch.zeros(2, 10, 8), torch.zeros(8, 4)
    with pytest.raises(UnsupportedProblemError, match="B = 2 with cu_seqlens"):
        causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 10]))

    def call(ctx):
        with pytest.raises(UnsupportedProblemError, match="B = 2 with cp_context"):
            causal_conv1d(x, weight, cp_context=ctx)
        return {}

    run_ranks(Partition.contiguous([0, 20], 2), call)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_20_repeats_of_the_weight_gradient_give_identical_bytes(layout):
    cu = boundaries([130, 1, 0, 300])
    problem = conv_problem(cu, dtype=torch.bfloat16, channels=96)
    alone = [conv_call(problem, output_final_state=True)["dweight"] for _ in range(20)]
    assert all(torch.equal(one, alone[0]) for one in alone)
    partition = getattr(Partition, layout)(cu, 3)
    parts = [[one["dweight"] for one in convolution(problem, partition).ranks] for _ in range(20)]
    assert all(all(map(torch.equal, one, parts[0])) for one in parts)


@pytest.mark.parametrize("tokens", [*range(1, 6), *range(63, 66), *range(127, 130)])
def test_nothing_past_the_end_is_read(tokens):
    """Rows behind the last token hold NaN; on ranks, so do the rows behind each rank's."""
    problem = conv_problem([0, tokens])
    padded = torch.cat([problem.x, torch.full((1, 5, 8), torch.nan)], dim=1)
    problem.x = padded[:, :tokens]
    assert_conv_near(conv_call(problem, output_final_state=True), problem)
    partition = Partition.zigzag([0, tokens], 2)

    def call(ctx):
        local = partition.shard(problem.x, ctx.rank)
        own = torch.cat([local, torch.full((1, 5, 8), torch.nan)], dim=1)[:, : local.shape[1]]
        tensors = problem.tensors() | {"x": own}
        y, final_state = causal_conv1d(**tensors, cp_context=ctx, output_final_state=True)
        return {"y": y, "final_state": final_state}

    expected = conv_reference(problem)
    for name, tensor in run_ranks(partition, call).whole.items():
        assert relative_error(tensor, expected[name]) <= FP32_CONV, name


# ---- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths, world_size", [((513, 511), 2), ((257, 1, 253, 257, 1, 253, 2), 4)])
def test_documents_off_every_boundary_equal_the_serial_run(lengths, world_size, layout):
    problem = make_problem(lengths)
    partition = getattr(Partition, layout)(boundaries(lengths), world_size)
    found = attention(problem, partition).whole
    serial = problems.run(chunk_kda, problem, output_final_state=True)
    for name, tensor in serial.items():
        assert torch.isfinite(found[name]).all(), name
        # Both round nearly the same fp32 numbers to bf16: an ulp apart, 2^-8, in a few of them.
        assert relative_error(found[name], tensor.double()) <= 1e-3, name


SMALL_PACKS = {
    "[0, 10] on 3": ([0, 10], 3),
    "[0, 2] on 3": ([0, 2], 3),
    "[0, 16, 40, 40, 40] on 2": ([0, 16, 40, 40, 40], 2),
    "[0, 16, 40, 40, 40] on 4": ([0, 16, 40, 40, 40], 4),
    "[0, 7] on 2": ([0, 7], 2),
    "[0, 0] on 2": ([0, 0], 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pack", SMALL_PACKS)
def test_ragged_packs_empty_documents_and_empty_ranks(pack, layout):
    cu, world_size = SMALL_PACKS[pack]
    partition = getattr(Partition, layout)(cu, world_size)
    problem = make_problem([end - start for start, end in zip(cu, cu[1:])], dtype=torch.float32)
    found = attention(problem, partition)
    assert found.whole["o"].shape[1] == cu[-1], "as many outputs as tokens"
    for name, tensor in problems.reference(problem).items():
        if tensor is None:  # a pack without tokens: autograd has no gradient where the value is 0
            assert not found.whole[name].any()
            continue
        limit = PARAMETER_BUDGET if name in ("dA_log", "ddt_bias") else FP32_ATTENTION
        assert (found.whole[name].double() - tensor).norm() <= limit * max(tensor.norm().item(), 1e-3), name
    for one in found.ranks:
        for name in ("dA_log", "ddt_bias", "dinitial_state"):
            assert one[name] is not None and torch.isfinite(one[name]).all(), "zeros where a rank owns nothing"
    problem = conv_problem(cu)
    assert_conv_near(convolution(problem, partition).whole, problem)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gates_that_differ_by_4_per_head_on_2_ranks(layout):
    lengths = (150, 40)
    problem = make_problem(lengths, heads=5, regime="softplus")
    problem.keywords["A_log"] = math.log(4.0) * torch.arange(5.0) - 1.0
    found = attention(problem, getattr(Partition, layout)(boundaries(lengths), 2)).whole
    assert_within_budgets(found, problems.reference(problem), problem, "softplus")


def test_a_walk_without_heads_is_refused():
    with pytest.raises(UnsupportedProblemError, match="0 value heads; at least one is needed"):
        transfer_walk(torch.zeros(2, 0, 64, 64), torch.zeros(2, 0, 64, 64), None, torch.tensor([0, 2]))


def test_a_rank_without_tokens_walks_for_others():
    """``spread`` deals chains to all ranks; one that holds nothing computes with what it is sent."""
    partition = Partition.from_fragments([0, 200], [(0, 0, 70), (1, 70, 140), (0, 140, 200)], world_size=4)
    problem = make_problem((200,), dtype=torch.float32)
    spread = attention(problem, partition, KcpOptions(exchange="spread"))
    relay = attention(problem, partition, KcpOptions(exchange="relay"))
    for mine, yours in zip(spread.ranks, relay.ranks):
        assert_same_bits(mine, yours)
    for rank in (2, 3):
        assert not any(tensor.any() for tensor in spread.ranks[rank].values())
