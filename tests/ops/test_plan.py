"""Plans: tables of a pack, made once; immutable, hashable, picklable; malformed boundaries are refused."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

from cake_kda_jit import UnsupportedProblemError, make_plan


def plan_of(boundaries, **options):
    return make_plan(torch.tensor(boundaries), **{"num_heads": 2, "head_dim": 64, "device": "cpu", **options})


def test_tables_of_a_small_pack():
    plan = plan_of([0, 65, 65, 193], segment_tokens=64)
    assert (plan.num_documents, plan.num_tokens, plan.num_chunks, plan.num_segments) == (3, 193, 4, 5)
    assert plan.chunk_table.tolist() == [[0, 0, 64, 0], [0, 64, 1, 1], [2, 65, 64, 3], [2, 129, 64, 4]]
    assert plan.segment_table.tolist() == [[0, 0, 1, 0], [0, 1, 1, 1], [1, 2, 0, -1], [2, 2, 1, 2], [2, 3, 1, 3]]
    assert plan.summary_offsets.tolist() == [0, 2, 2, 4]


def test_plans_are_values():
    plan, twin = plan_of([0, 65, 193]), plan_of([0, 65, 193])
    assert plan == twin and hash(plan) == hash(twin)
    assert plan != plan_of([0, 66, 193]) and plan != plan_of([0, 65, 193], segment_tokens=64)
    for other in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert other == plan and torch.equal(other.chunk_table, plan.chunk_table)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.num_heads = 4


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_host_copy_spares_reading_the_tensor(dtype):
    boundaries = torch.tensor([0, 65, 193], dtype=dtype)
    assert plan_of([0, 65, 193]) == plan_of([0, 65, 193], cu_seqlens_cpu=boundaries)


@pytest.mark.parametrize(
    ("boundaries", "options", "message"),
    [
        ([0, 12, 8, 16], {}, r"cu_seqlens\[2\] = 8 is below cu_seqlens\[1\] = 12"),
        ([3, 8], {}, "starts with 3"),
        ([0.0, 8.0], {}, "torch.float32"),
        ([[0, 8]], {}, r"of shape \[1, 2\]"),
        ([0, 8], {"num_heads": 0}, "num_heads=0"),
        ([0, 8], {"num_value_heads": 3}, "num_value_heads=3"),
        ([0, 8], {"head_dim": 96}, "head_dim=96"),
        ([0, 8], {"segment_tokens": 32}, "segment_tokens=32"),
        ([0, 2**31], {}, "at most 2147483647"),
        ([0, 8], {"cu_seqlens_cpu": torch.tensor([0, 4, 8])}, "must be the CPU copy"),
    ],
)
def test_what_no_kernel_takes_is_refused(boundaries, options, message):
    with pytest.raises(UnsupportedProblemError, match=message):
        plan_of(boundaries, **options)


def test_a_pack_of_no_documents():
    plan = plan_of([0])
    assert (plan.num_documents, plan.num_chunks, plan.num_segments) == (0, 0, 0)
    assert plan.summary_offsets.tolist() == [0]


def test_ten_thousand_documents():
    lengths = torch.arange(10_000) % 130
    plan = make_plan(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), num_heads=32, device="cpu")
    assert plan.num_chunks == int((-(-lengths // 64)).sum())
    assert torch.equal(plan.chunk_table[:, 2].sum(), lengths.sum())
