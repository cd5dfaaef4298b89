"""Options change memory and time, never bits: backward modes, checkpoints, head blocks, segments."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from cake_kda_jit import KdaOptions, UnsupportedProblemError, chunk_kda, last_launches, make_plan
from cake_kda_jit.bench import problems
from cake_kda_jit.bench.problems import make_problem, run
from cake_kda_jit.ops.select import segment_rule
from cake_kda_jit.ops.workspace import HeadBlock, head_blocks

LENGTHS = (70, 0, 333, 64, 1)


def planned(problem, segment_tokens=None, heads=2, value_heads=2):
    return make_plan(
        problem.cu_seqlens,
        num_heads=heads,
        num_value_heads=value_heads,
        head_dim=64,
        device="cpu",
        segment_tokens=segment_tokens,
    )


def with_plan(plan):
    def call(*inputs, cu_seqlens, **keywords):
        return chunk_kda(*inputs, plan=plan, **keywords)

    return call


def assert_same_bits(found, expected):
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def problem():
    return make_problem(LENGTHS, heads=2, value_heads=4)


@pytest.fixture(scope="module", params=[0, 128], ids=["whole", "segments"])
def segmented(request, problem):
    """A plan, and what the default options give with it."""
    plan = planned(problem, request.param, value_heads=4)
    return plan, run(with_plan(plan), problem, output_final_state=True)


# About 1.7 MB of scratch a key head at this size, 0.7 MB where the decayed q and k are kept: limits that give one block
# of both key heads, and one each.
@pytest.mark.parametrize(
    "backward, checkpoint_tokens, workspace_limit, keep_decayed_qk",
    [
        *itertools.product(["saved", "replay"], [64, 128, 512], [None, 3_000_000], [False]),
        ("replay", 4096, 3_000_000, False),
        ("saved", 512, None, True),
        ("saved", 512, 1_000_000, True),
    ],
)
def test_options_change_no_bit(
    segmented, problem, backward, checkpoint_tokens, workspace_limit, keep_decayed_qk, nan_poison
):
    plan, expected = segmented
    options = KdaOptions(backward, checkpoint_tokens, workspace_limit, keep_decayed_qk=keep_decayed_qk)
    found = run(with_plan(plan), problem, output_final_state=True, options=options)
    assert_same_bits(found, expected)
    blocks = sum(launched.program == "chunk_grad" for launched in last_launches())
    assert blocks == (1 if workspace_limit is None else 2)


def test_segments_change_results_by_rounding_only(problem):
    """Two orders of the same fp32 sums, and the walk's 3e-7; outputs are bf16, so a rare last bit differs."""
    whole = run(with_plan(planned(problem, 0, value_heads=4)), problem, output_final_state=True)
    expected = problems.reference(problem)
    for segment_tokens in (64, 128, 192):
        found = run(with_plan(planned(problem, segment_tokens, value_heads=4)), problem, output_final_state=True)
        for name, tensor in found.items():
            assert problems.relative_error(tensor, whole[name].double()) < 2e-4, name
        for name in ("final_state", "dinitial_state"):
            assert problems.relative_error(found[name], expected[name]) < 2e-6, name


@pytest.mark.parametrize("with_state", [True, False])
def test_segments_of_long_documents_in_fp32(with_state):
    """By the rule itself: 8,200 tokens at few heads are five segments. fp32 end to end shows the walk."""
    problem = make_problem((8200, 100), heads=1, dtype=torch.float32, regime="weak", with_state=with_state)
    plan = planned(problem, None, heads=1, value_heads=1)
    assert plan.num_segments == 6 and plan.num_summaries == 5
    found = run(with_plan(plan), problem, output_final_state=True)
    expected = problems.reference(problem)
    for name, tensor in found.items():
        tolerance = 1e-3 if name in ("dA_log", "ddt_bias") else 2e-5  # the parameters' sums cancel
        assert problems.relative_error(tensor, expected[name]) < tolerance, name


def test_neighbours_change_no_bit_of_a_segmented_document():
    problem = make_problem((100, 300, 40), with_state=False)
    o, _ = chunk_kda(*problem.inputs.values(), plan=planned(problem, 64), **problem.keywords)
    alone = {name: tensor[:, 100:400] for name, tensor in problem.inputs.items()}
    plan = make_plan(torch.tensor([0, 300]), num_heads=2, head_dim=64, device="cpu", segment_tokens=64)
    found, _ = chunk_kda(*alone.values(), plan=plan, **problem.keywords)
    assert torch.equal(found, o[:, 100:400])


def test_segment_rule_depends_on_heads_and_the_documents_own_length():
    assert segment_rule(64, 128).num_segments(10**6) == 1
    assert segment_rule(32, 128).num_segments(10**6) == 1
    assert [segment_rule(8, 128).num_segments(n) for n in (0, 1, 8191, 8192, 8193)] == [1, 1, 1, 4, 5]
    assert [segment_rule(8, 128).num_segments(n) for n in (32768, 32769, 65536, 131072, 10**6)] == [16, 9, 16, 16, 16]
    assert [segment_rule(8, 128).tokens_of(n) for n in (8191, 32768, 32769, 131072)] == [8191, 2048, 4096, 8192]
    assert segment_rule(1, 128).num_segments(131072) == 64 and segment_rule(16, 128).num_segments(131072) == 8
    assert segment_rule(16, 64) == segment_rule(8, 128)


def test_head_blocks_are_whole_groups_of_equal_size():
    assert head_blocks(100, 4, 8, 850) == [HeadBlock(0, 8)]
    assert head_blocks(100, 4, 8, 799) == [HeadBlock(0, 4), HeadBlock(4, 4)]
    assert head_blocks(100, 3, 3, 200) == [HeadBlock(0, 2), HeadBlock(2, 1)]
    assert head_blocks(10**12, 2, 2, None) == [HeadBlock(0, 1), HeadBlock(1, 1)]  # the default limit never refuses
    with pytest.raises(UnsupportedProblemError, match="workspace_limit=199 bytes is too small: 2 value heads"):
        head_blocks(100, 4, 8, 199)


def test_a_workspace_too_small_for_one_group_is_refused(problem):
    with pytest.raises(UnsupportedProblemError, match="workspace_limit=1000 bytes is too small"):
        chunk_kda(
            *problem.inputs.values(),
            cu_seqlens=problem.cu_seqlens,
            options=KdaOptions(workspace_limit=1000),
            **problem.keywords,
        )


def test_options_from_the_environment_are_resolved_once(monkeypatch, problem):
    """The backward uses what the forward resolved, whatever the environment says by then."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in problem.inputs.items()}
    monkeypatch.setenv("CAKE_KDA_JIT_BACKWARD", "replay")
    monkeypatch.setenv("CAKE_KDA_JIT_CHECKPOINT_TOKENS", "64")
    o, _ = chunk_kda(*leaves.values(), cu_seqlens=problem.cu_seqlens, **problem.keywords)
    monkeypatch.setenv("CAKE_KDA_JIT_CHECKPOINT_TOKENS", "128")
    o.float().sum().backward()
    [scanned] = [launched for launched in last_launches() if launched.program == "grad_scan"]
    intervals = sum(max(1, -(-length // 64)) for length in LENGTHS)
    assert scanned.grid[0] >= intervals  # an interval of 64 tokens each, as the forward kept them


@pytest.mark.parametrize(
    "options, message",
    [
        ({"backward": "none"}, r"backward='none'; use one of \('saved', 'replay'\)"),
        ({"backward": np.array("saved")}, r"backward=array\('saved'.*use one of \('saved', 'replay'\)"),
        ({"checkpoint_tokens": 100}, "checkpoint_tokens=100; use a positive multiple of 64"),
        ({"checkpoint_tokens": 0}, "checkpoint_tokens=0"),
        ({"checkpoint_tokens": 2**31}, r"checkpoint_tokens=2147483648; use a positive multiple of 64 below 2\^31"),
        ({"checkpoint_tokens": "64"}, "checkpoint_tokens='64'; give an integer"),
        ({"checkpoint_tokens": 64.0}, r"checkpoint_tokens=64\.0; give an integer"),
        ({"workspace_limit": 0}, "workspace_limit=0; use a number of bytes"),
        ({"workspace_limit": 2**63}, r"workspace_limit=9223372036854775808; use a number of bytes, below 2\^63"),
        ({"workspace_limit": 1e9}, r"workspace_limit=1000000000\.0; give an integer"),
        ({"workspace_limit": True}, "workspace_limit=True; give an integer"),
        ({"family": "tpu"}, "family='tpu'"),
        ({"keep_decayed_qk": 1}, "keep_decayed_qk=1; use True or False"),
        ({"keep_decayed_qk": None}, "keep_decayed_qk=None; use True or False"),
        ({"backward": "replay", "keep_decayed_qk": True}, "keep_decayed_qk=True beside backward='replay'"),
    ],
)
def test_bad_options_are_refused_when_they_are_made(options, message):
    """Not in a call, which may find another one under an equal key: 1e9 equals an integer."""
    with pytest.raises(UnsupportedProblemError, match=message):
        KdaOptions(**options)


def test_segment_tokens_is_a_multiple_of_a_chunk(problem):
    with pytest.raises(UnsupportedProblemError, match="segment_tokens=100"):
        planned(problem, 100, value_heads=4)
