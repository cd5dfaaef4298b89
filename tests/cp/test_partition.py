"""Partitions: every layout against its definition one token at a time, and what holds for all of them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cake_kda_jit import Fragment, Partition, UnsupportedProblemError

from .packs import LAYOUTS, custom_partitions, packs, tokens_of_ranks

SETTINGS = settings(max_examples=150, derandomize=True, deadline=None)
WORLD_SIZES = st.integers(1, 9)
RAGGED = (0, 13, 18, 20)


def made(layout, cu, world_size) -> Partition:
    return getattr(Partition, layout)(cu, world_size)


def tokens(partition, rank) -> list[int]:
    return partition.local_index(rank).tolist()


def ranges(partition, rank) -> list[tuple[int, int]]:
    return [(fragment.start, fragment.end) for fragment in partition.fragments(rank)]


def check(partition: Partition) -> None:
    """Raise unless the partition tiles its pack and all its views agree."""
    size = range(partition.world_size)
    assert sorted(token for rank in size for token in tokens(partition, rank)) == list(range(partition.num_tokens))
    everything = []
    for rank in size:
        fragments = partition.fragments(rank)
        everything += fragments
        assert tokens(partition, rank) == [t for f in fragments for t in range(f.start, f.end)]
        assert tokens(partition, rank) == [t for one in partition.local_ranges(rank) for t in one]
        assert len(tokens(partition, rank)) == partition.num_local_tokens(rank)
        lengths = [f.num_tokens for f in fragments]
        assert partition.local_cu_seqlens(rank) == tuple(sum(lengths[:n]) for n in range(len(lengths) + 1))
        for document, start, end, holder in fragments:
            assert holder == rank and start < end
            assert partition.cu_seqlens[document] <= start and end <= partition.cu_seqlens[document + 1]
    assert partition.all_fragments() == tuple(sorted(everything, key=lambda f: f.start))
    assert partition.num_fragments == len(everything)


@pytest.mark.parametrize(
    "layout, expected",
    [
        ("contiguous", [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]),
        ("zigzag", [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]),
        ("per_document_zigzag", [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]),
    ],
)
def test_two_documents_of_eight_on_two_ranks(layout, expected):
    partition = made(layout, [0, 8, 16], 2)
    assert [tokens(partition, rank) for rank in range(2)] == expected
    assert (partition.layout, partition.num_tokens, partition.num_documents) == (layout, 16, 2)


def test_the_ragged_example():
    partition = Partition.per_document_zigzag(RAGGED, 2)
    assert ranges(partition, 0) == [(0, 4), (10, 13), (13, 15), (17, 18), (18, 19)]
    assert ranges(partition, 1) == [(4, 7), (7, 10), (15, 16), (16, 17), (19, 20)]
    assert partition.fragments(1)[2] == Fragment(document=1, start=15, end=16, rank=1)
    assert partition.local_cu_seqlens(0) == (0, 4, 7, 9, 10, 11)


@SETTINGS
@given(packs(), WORLD_SIZES, st.sampled_from(LAYOUTS))
def test_layouts_follow_their_definition(cu, world_size, layout):
    partition = made(layout, cu, world_size)
    check(partition)
    assert [tokens(partition, rank) for rank in range(world_size)] == tokens_of_ranks(layout, cu, world_size)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "cu, world_size",
    [([0, 10], 3), ([0, 2], 3), ([0, 16, 40, 40, 40], 2), ([0, 7], 2), ([0], 4), ([0, 0, 0], 2), ([0, 1], 9)],
)
def test_reported_packs(layout, cu, world_size):
    partition = made(layout, cu, world_size)
    check(partition)
    x = torch.arange(float(cu[-1])).reshape(1, -1)
    shards = [partition.shard(x, rank) for rank in range(world_size)]
    assert sum(shard.shape[1] for shard in shards) == cu[-1]
    assert torch.equal(partition.unshard(shards), x)


def test_a_rank_that_holds_nothing():
    partition = Partition.contiguous([0, 2], 3)
    assert [partition.num_local_tokens(rank) for rank in range(3)] == [0, 1, 1]
    assert partition.fragments(0) == () and partition.local_cu_seqlens(0) == (0,) and partition.local_ranges(0) == ()
    assert partition.shard(torch.zeros(1, 2, 5), 0).shape == (1, 0, 5)


@SETTINGS
@given(packs(max_documents=12), WORLD_SIZES, st.integers(0, 50))
def test_balanced(cu, world_size, whole_below):
    partition = Partition.balanced(cu, world_size, whole_below=whole_below)
    check(partition)
    lengths = [end - start for start, end in zip(cu, cu[1:])]
    num_cuts = partition.num_fragments - sum(length > 0 for length in lengths)
    assert num_cuts <= world_size - 1
    whole = [0] * world_size
    for document, start, end, rank in partition.all_fragments():
        if lengths[document] < whole_below:
            assert end - start == lengths[document]
            whole[rank] += end - start
    # Ranks that the long documents reach are level; any other one is as full without them.
    held = [partition.num_local_tokens(rank) for rank in range(world_size)]
    reached = [held[rank] for rank in range(world_size) if held[rank] > whole[rank]]
    if reached:
        assert max(reached) - min(reached) <= 1
        assert all(held[rank] >= max(reached) - 1 for rank in range(world_size))


def test_balanced_is_even_where_it_can_be():
    partition = Partition.balanced([0, 100, 150, 900], 3, whole_below=200)
    assert [partition.num_local_tokens(rank) for rank in range(3)] == [300, 300, 300]
    assert ranges(partition, 0) == [(0, 100), (150, 350)]
    alone = Partition.balanced([0, 700, 800], 2, whole_below=701)
    assert [ranges(alone, rank) for rank in range(2)] == [[(0, 700)], [(700, 800)]]


@SETTINGS
@given(custom_partitions())
def test_custom_keeps_the_order_given(drawn):
    partition, given_ranges = drawn
    check(partition)
    for rank in range(partition.world_size):
        assert tokens(partition, rank) == [t for r, start, end in given_ranges if r == rank for t in range(start, end)]


def test_custom_of_a_layout_has_its_fragments():
    zigzag = Partition.per_document_zigzag(RAGGED, 2)
    custom = Partition.from_fragments(RAGGED, [(f.rank, f.start, f.end) for f in reversed(zigzag.all_fragments())])
    assert custom.all_fragments() == zigzag.all_fragments()
    assert tokens(custom, 1) == [19, 16, 15, 7, 8, 9, 4, 5, 6]
    forward = Partition.from_fragments(RAGGED, np.array([[f.rank, f.start, f.end] for f in zigzag.all_fragments()]))
    assert forward.order is None and forward.starts == zigzag.starts and forward.world_size == 2
    assert Partition.from_fragments(RAGGED, [(0, 0, 20), (1, 20, 20)], world_size=4).world_size == 4
    assert Partition.from_fragments([0], []).num_fragments == 0


@SETTINGS
@given(packs(), WORLD_SIZES, st.data())
def test_padded_chunks(cu, world_size, data):
    """A token lies where its place in the padded document puts it."""
    parts = 2 * world_size
    padded = [0]
    for start, end in zip(cu, cu[1:]):
        least = -(-(end - start) // parts)
        padded.append(padded[-1] + parts * data.draw(st.integers(least, least + 2)))
    partition = Partition.from_padded(cu, padded, world_size)
    check(partition)
    expected = [[] for _ in range(world_size)]
    for document, (start, end) in enumerate(zip(cu, cu[1:])):
        room = padded[document + 1] - padded[document]
        for token in range(start, end):
            chunk = (token - start) * parts // room
            expected[min(chunk, parts - 1 - chunk)].append(token)
    assert [tokens(partition, rank) for rank in range(world_size)] == expected


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_boundaries_of_every_kind(make):
    expected = Partition.zigzag(RAGGED, 3)
    given_boundaries = make(RAGGED)
    assert Partition.zigzag(given_boundaries, 3) == expected
    if not isinstance(given_boundaries, (list, tuple)):
        assert (
            Partition.zigzag(make(RAGGED, dtype={np.array: np.int32, torch.tensor: torch.int32}[make]), 3) == expected
        )
        given_boundaries[1] = 14
        assert expected.cu_seqlens == RAGGED


def test_equal_content_is_equal():
    one, other = Partition.zigzag(RAGGED, 3), Partition.zigzag(list(RAGGED), 3)
    one.fragments(0)
    assert one == other and hash(one) == hash(other) and one.digest() == other.digest()
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one and copy.fragments(2) == one.fragments(2)
    assert len({one, other, copy}) == 1
    assert repr(one) == "<Partition zigzag: 20 tokens in 3 documents on 3 ranks>"
    with pytest.raises(AttributeError):
        one.world_size = 4


def test_digests_tell_what_differs():
    one = Partition.contiguous(RAGGED, 1)
    renamed = Partition.zigzag(RAGGED, 1)
    assert one.digest() != renamed.digest(), "ranks that name different layouts disagree"
    differing = {name for name, digest in one.digests().items() if renamed.digests()[name] != digest}
    assert differing >= {"layout"}
    swapped = Partition.from_fragments([0, 8], [(0, 4, 8), (0, 0, 4)])
    plain = Partition.from_fragments([0, 8], [(0, 0, 4), (0, 4, 8)])
    assert {n for n, d in swapped.digests().items() if plain.digests()[n] != d} == {"order"}


def test_a_digest_is_the_same_in_every_process_and_torch_is_not_imported():
    code = (
        "import sys\n"
        "from cake_kda_jit import Partition\n"
        "partition = Partition.per_document_zigzag([0, 13, 18, 20], 2)\n"
        "str(partition.explain()), partition.explain().as_json(), partition.fragments(0), partition.local_ranges(1)\n"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "print(partition.digest())\n"
    )
    for seed in ("0", "1"):
        run = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
                             check=True, capture_output=True, text=True, timeout=60)  # fmt: skip
        assert run.stdout.strip() == Partition.per_document_zigzag(RAGGED, 2).digest()


@pytest.mark.parametrize("layout", [*LAYOUTS, "custom"])
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_shards_are_gathered_exactly(layout, dim):
    partition = made(layout, RAGGED, 3) if layout != "custom" else Partition.from_fragments(
        RAGGED, [(2, 15, 20), (0, 4, 15), (2, 0, 4)]
    )  # fmt: skip
    shape = [3, 4, 5]
    shape[dim] = 20
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    shards = [partition.shard(x, rank, dim) for rank in range(3)]
    assert torch.equal(partition.unshard(shards, dim), x)
    # A weight for every element, another for every shard: the gradient says which element each one came from.
    weight = torch.randn(shape, dtype=torch.float64)
    (partition.unshard([(rank + 2) * shard for rank, shard in enumerate(shards)], dim) * weight).sum().backward()
    factor = torch.empty(20, dtype=torch.float64)
    for rank in range(3):
        factor[partition.local_index(rank)] = rank + 2
    view = [1, 1, 1]
    view[dim] = 20
    assert torch.equal(x.grad, weight * factor.reshape(view))


@pytest.mark.gpu
def test_on_a_gpu():
    cu = torch.tensor(RAGGED, device="cuda")
    partition = Partition.per_document_zigzag(cu, 3)
    assert partition == Partition.per_document_zigzag(RAGGED, 3)
    x = torch.randn(1, 20, 8, device="cuda", dtype=torch.bfloat16)
    shards = [partition.shard(x, rank) for rank in range(3)]
    assert all(shard.is_cuda for shard in shards) and torch.equal(partition.unshard(shards), x)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Partition.contiguous([0, 5, 3], 2), r"cu_seqlens\[2\] = 3 is below cu_seqlens\[1\] = 5"),
        (lambda: Partition.contiguous([1, 5], 2), "starts with 1"),
        (lambda: Partition.contiguous([], 2), "starts with nothing"),
        (lambda: Partition.contiguous([0, 2.0], 2), r"cu_seqlens\[1\] = 2.0 is float"),
        (lambda: Partition.contiguous(torch.tensor([0.0, 2.0]), 2), "is float"),
        (lambda: Partition.contiguous([0, True], 2), "is bool"),
        (lambda: Partition.contiguous([0, torch.tensor(2.5)], 2), r"cu_seqlens\[1\] = tensor\(2.5000\) is Tensor"),
        (lambda: Partition.contiguous([0, 5], np.array([1, 2])), r"world_size=array\(\[1, 2\]\)"),
        (lambda: Partition.contiguous(torch.tensor([[0, 2]]), 2), "is list"),
        (lambda: Partition.contiguous(5, 2), "cu_seqlens is int"),
        (lambda: Partition.contiguous(torch.tensor(5), 2), "cu_seqlens is Tensor"),
        (lambda: Partition.contiguous([0, 2**31], 2), "at most 2147483647"),
        (lambda: Partition.zigzag([0, 5], 0), "world_size=0; give the number of ranks, at least 1"),
        (lambda: Partition.per_document_zigzag([0, 5], 2.0), "world_size=2.0"),
        (lambda: Partition.balanced([0, 5], 2, whole_below=-1), "whole_below=-1"),
        (lambda: Partition.from_padded([0, 5], [0, 4], 1), "document 0 has 5 tokens, padded to 4.*pad it to 6"),
        (lambda: Partition.from_padded([0, 4, 9], [0, 4, 10], 2), "document 1 has 5 tokens, padded to 6.*pad it to 8"),
        (lambda: Partition.from_padded([0, 4], [0, 4, 8], 2), "3 entries and cu_seqlens 2"),
        (lambda: Partition.from_padded([0, 4], [0, -4], 2), r"cu_seqlens_padded\[1\] = -4"),
        (lambda: Partition.zigzag([0, 5], 2).fragments(2), "rank=2; give one of the 2 ranks"),
        (lambda: Partition.zigzag([0, 5], 2).local_cu_seqlens(-1), "rank=-1"),
        (lambda: Partition.zigzag([0, 5], 2).explain(conv_width=0), "conv_width=0; give a positive integer"),
        (lambda: Partition.zigzag([0, 5], 2).explain(head_dim=1.5), "head_dim=1.5"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(UnsupportedProblemError, match=words):
        make()


@pytest.mark.parametrize(
    "fragments, words",
    [
        ([(0, 0, 5), (1, 4, 20)], r"tokens \[4, 5\) of document 0 are given twice, to rank 0 and to rank 1"),
        ([(1, 2, 17), (0, 0, 20)], r"tokens \[2, 17\) of documents 0 to 1 are given twice"),
        ([(0, 0, 5), (1, 8, 20)], r"tokens \[5, 8\) of document 0 are given to no rank"),
        ([(0, 2, 20)], r"tokens \[0, 2\) of document 0 are given to no rank"),
        ([(0, 0, 15)], r"tokens \[15, 20\) of documents 1 to 2 are given to no rank"),
        ([(0, 0)], r"fragments\[0\] = \(0, 0\); give \(rank, start, end\)"),
        ([(0, 0, 20), (-1, 3, 4)], r"fragments\[1\]"),
        ([(0, 0, 2.5)], r"fragments\[0\]"),
        (7, r"fragments is int; give a list of \(rank, start, end\)"),
        ([7], r"fragments\[0\] = 7"),
        ([(0, 0, 21)], r"fragments\[0\] = \(0, 0, 21\); start to end must lie in the pack's 20 tokens"),
        ([(0, 5, 4)], "start <= end"),
    ],
)
def test_fragments_that_do_not_tile_are_named(fragments, words):
    with pytest.raises(UnsupportedProblemError, match=words):
        Partition.from_fragments(RAGGED, fragments)


def test_a_rank_beyond_the_world_is_named():
    with pytest.raises(UnsupportedProblemError, match="given to rank 2, but there are 2 ranks"):
        Partition.from_fragments(RAGGED, [(0, 0, 5), (2, 5, 20)], world_size=2)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda p: p.shard(torch.zeros(1, 19), 0), r"x has shape \[1, 19\] and tokens along dim=1; the pack has 20"),
        (lambda p: p.shard(torch.zeros(20), 0), "dim=1; the pack has 20"),
        (lambda p: p.shard([1], 0), "x is list"),
        (lambda p: p.shard(torch.zeros(1, 20), 2), "rank=2"),
        (lambda p: p.unshard([torch.zeros(1, 11)]), "1 tensors were given for 2 ranks"),
        (lambda p: p.unshard([torch.zeros(1, 9), torch.zeros(1, 11)]), r"locals\[0\] has shape.*rank 0 holds 11"),
    ],
)
def test_tensors_that_do_not_fit(call, words):
    with pytest.raises(UnsupportedProblemError, match=words):
        call(Partition.per_document_zigzag(RAGGED, 2))


def test_ten_thousand_documents_on_64_ranks_are_quick():
    cu = list(range(0, 10_001 * 301, 301))
    seconds = []
    for _ in range(3):
        start = time.process_time()
        partition = Partition.per_document_zigzag(cu, 64)
        partition.fragments(63), partition.local_cu_seqlens(63), partition.digest()
        seconds.append(time.process_time() - start)
    assert partition.num_fragments == 1_280_000
    # Half of the second that a partition and its plan may take together. Processor time, and the best of three,
    # because other programs run here too.
    assert min(seconds) < 0.5, seconds
