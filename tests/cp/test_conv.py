"""The convolution on ranks: halos over several ranks, and gradients that are exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cake_kda_jit import KcpContext, Partition, PlanMismatchError, UnsupportedProblemError, VirtualGroup, causal_conv1d
from cake_kda_jit.bench.problems import relative_error
from cake_kda_jit.reference import causal_conv1d_reference

from .ranks import LAYOUTS, assert_same_bits, boundaries, conv_call, conv_problem, convolution, partitions, run_ranks

SETTINGS = settings(
    max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LENGTHS = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 30)), min_size=1, max_size=6)

# fp32 sums of at most 4 products a token, and of all tokens for weights: a few ulps of 6e-8, with room for cancelling.
FP32_TOLERANCE = 2e-6


def reference(problem):
    def call(cu_seqlens, **tensors):
        return causal_conv1d_reference(cu_seqlens=cu_seqlens, **tensors)

    return conv_call(problem, call, dtype=torch.float64)


@SETTINGS
@given(
    partition=partitions(LENGTHS),
    width=st.integers(2, 4),
    with_bias=st.booleans(),
    with_state=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_packs_against_fp64(partition, width, with_bias, with_state, seed, nan_poison):
    problem = conv_problem(
        partition.cu_seqlens, width=width, with_bias=with_bias, with_state=with_state, seed=seed, channels=5
    )
    found = convolution(problem, partition).whole
    for name, tensor in reference(problem).items():
        scale = max(1.0, tensor.norm().item())
        assert (found[name].double() - tensor).norm().item() <= FP32_TOLERANCE * scale, name


@SETTINGS
@given(partition=partitions(LENGTHS), width=st.integers(2, 4), with_state=st.booleans())
def test_outputs_have_the_bits_of_one_device(partition, width, with_state, nan_poison):
    """A halo in fp32 holds each token exactly: y and final states are those of the whole pack, in bf16 too."""
    problem = conv_problem(partition.cu_seqlens, width=width, with_state=with_state, dtype=torch.bfloat16, channels=5)
    expected = conv_call(problem, output_final_state=True)
    found = convolution(problem, partition).whole
    assert_same_bits(found, {name: expected[name] for name in ("y", "final_state")})


def test_token_gradients_are_summed_before_they_are_rounded(nan_poison):
    """Rounded parts would be off by up to an ulp of bf16, 4e-3; one rounding of the fp32 sum leaves a hundredth."""
    problem = conv_problem([0, 400], dtype=torch.bfloat16, channels=64)
    partition = Partition.from_fragments([0, 400], [(token % 4, token, token + 1) for token in range(400)])
    found, expected = convolution(problem, partition).whole["dx"], reference(problem)["dx"]
    nearest = expected.to(torch.bfloat16)
    # An fp32 sum of four terms rounds to another bf16 number only within 1e-6 of the middle between two.
    assert (found != nearest).float().mean() < 1e-3


def test_states_in_fp32_beside_tokens_in_bf16(nan_poison):
    partition = Partition.from_fragments([0, 1, 6], [(0, 0, 2), (1, 2, 3), (2, 3, 6)])
    problem = conv_problem(partition.cu_seqlens, dtype=torch.bfloat16, state_dtype=torch.float32)
    found, expected = convolution(problem, partition), reference(problem)
    assert found.whole["final_state"].dtype == found.whole["dinitial_state"].dtype == torch.float32
    # weights, x and dy are bf16; sums and states are fp32
    assert relative_error(found.whole["dinitial_state"], expected["dinitial_state"]) <= FP32_TOLERANCE
    for name in ("final_state", "dinitial_state"):
        for rank, one in enumerate(found.ranks):
            owned = {0: {"final_state": (0,), "dinitial_state": (0, 1)}, 2: {"final_state": (1,)}}.get(rank, {})
            other = [n for n in range(2) if n not in owned.get(name, ())]
            assert not one[name][other].any(), "rows of other ranks are 0"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_have_the_same_bits(layout, nan_poison):
    partition = getattr(Partition, layout)(boundaries([5, 0, 33, 2, 60]), 3)
    problem = conv_problem(partition.cu_seqlens, dtype=torch.bfloat16)
    first, *others = (convolution(problem, partition) for _ in range(3))
    for other in others:
        for mine, yours in zip(first.ranks, other.ranks):
            assert_same_bits(mine, yours)


def test_one_document_does_not_reach_another(nan_poison):
    partition = Partition.per_document_zigzag(boundaries([9, 14, 5]), 4)
    problem = conv_problem(partition.cu_seqlens, dtype=torch.bfloat16)
    before = convolution(problem, partition).whole
    for tensor in (problem.x, problem.dy):
        tensor[:, 9:23] = torch.randn(1, 14, 8).to(tensor)
    after = convolution(problem, partition).whole
    for name in ("y", "dx"):
        assert torch.equal(before[name][:, :9], after[name][:, :9]), name
        assert torch.equal(before[name][:, 23:], after[name][:, 23:]), name


@pytest.mark.parametrize("activation", ["silu", None])
def test_activations_and_no_final_state(activation, nan_poison):
    partition = Partition.zigzag([0, 7, 20], 2)
    problem = conv_problem(partition.cu_seqlens)
    expected, _ = causal_conv1d(**problem.tensors(), cu_seqlens=torch.tensor(problem.cu), activation=activation)

    def call(ctx):
        tensors = problem.tensors() | {"x": partition.shard(problem.x, ctx.rank)}
        y, final_state = causal_conv1d(**tensors, cp_context=ctx, activation=activation)
        assert final_state is None
        return {"y": y}

    assert torch.equal(run_ranks(partition, call).whole["y"], expected)


def test_strided_tokens_have_the_bits_of_contiguous_ones(nan_poison):
    partition = Partition.contiguous([0, 7, 20], 2)
    problem = conv_problem(partition.cu_seqlens)

    def call(ctx):
        x = partition.shard(problem.x, ctx.rank)
        strided = torch.stack([x, x], dim=-1)[..., 0]
        assert not strided.is_contiguous()
        weight = problem.weight
        return {name: causal_conv1d(x, weight, cp_context=ctx)[0] for name, x in (("y", x), ("o", strided))}

    found = run_ranks(partition, call).whole
    assert torch.equal(found["y"], found["o"])


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"cu_seqlens": torch.tensor([0, 10])}, UnsupportedProblemError, "cu_seqlens is given beside cp_context"),
        ({"x": torch.zeros(2, 10, 8)}, UnsupportedProblemError, "B = 2 with cp_context"),
        ({"x": torch.zeros(1, 9, 8)}, PlanMismatchError, "x has 9 tokens; rank 0 of this partition holds 10"),
        ({"initial_state": torch.zeros(1, 8, 3)}, UnsupportedProblemError, r"expected \[N, D, W - 1\] = \[2, 8, 3\]"),
        ({"cp_context": object()}, UnsupportedProblemError, "cp_context is object; give KcpContext"),
    ],
)
def test_wrong_calls_are_refused(change, error, message):
    partition = Partition.contiguous([0, 5, 10], 1)
    ctx = KcpContext(partition, VirtualGroup(1)).of_rank(0)
    arguments = {"x": torch.zeros(1, 10, 8), "weight": torch.zeros(8, 4), "cp_context": ctx} | change
    with pytest.raises(error, match=message):
        causal_conv1d(**arguments)
