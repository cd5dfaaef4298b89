"""Index maps against the shards that the other libraries make, each cut here by its own rule."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cake_kda_jit import Partition, UnsupportedProblemError
from cake_kda_jit.cp import maps

SETTINGS = settings(max_examples=80, derandomize=True, deadline=None)
WORLD_SIZES = st.integers(1, 6)
PADDING = -7.0


def head_and_tail(x: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Chunks ``rank`` and 2W - 1 - ``rank`` of the 2W equal chunks of a tensor."""
    cut = x.reshape(2 * world_size, -1)
    return torch.cat([cut[rank], cut[2 * world_size - 1 - rank]])


@st.composite
def padded_packs(draw) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Boundaries without padding, with it, and a world size."""
    world_size = draw(WORLD_SIZES)
    rooms = draw(st.lists(st.integers(0, 4), max_size=6))
    rooms = [2 * world_size * room for room in rooms]
    lengths = [draw(st.integers(0, room)) for room in rooms]
    return tuple(accumulate(lengths, initial=0)), tuple(accumulate(rooms, initial=0)), world_size


@SETTINGS
@given(padded_packs())
def test_megatron(drawn):
    cu, padded, world_size = drawn
    found = maps.megatron(cu, padded, world_size)
    pack = torch.arange(float(cu[-1]))
    documents = [torch.full((end - start,), PADDING) for start, end in zip(padded, padded[1:])]
    for document, (start, end) in enumerate(zip(cu, cu[1:])):
        documents[document][: end - start] = pack[start:end]
    for rank in range(world_size):
        buffer = torch.cat([head_and_tail(x, rank, world_size) for x in documents] or [pack])
        assert found.num_slots == len(buffer)
        assert found.num_padding(rank) == int((buffer == PADDING).sum())
        local = found.partition.shard(pack, rank, dim=0)
        assert torch.equal(found.from_buffer(buffer, rank, dim=0), local)
        assert torch.equal(found.to_buffer(local, rank, dim=0), buffer.masked_fill(buffer == PADDING, 0))
        assert torch.equal(found.tokens(rank), buffer.masked_fill(buffer == PADDING, -1).long())


def test_megatron_gradients_pass_to_tokens_alone():
    found = maps.megatron([0, 5, 7], [0, 8, 12], 2)
    assert found.has_padding and [found.num_padding(rank) for rank in range(2)] == [3, 2]
    buffer = torch.randn(1, 6, 3, dtype=torch.float64, requires_grad=True)
    local = found.from_buffer(buffer, 0)
    weight = torch.randn_like(buffer)
    (found.to_buffer(local, 0) * weight).sum().backward()
    is_token = (found.tokens(0) >= 0).reshape(1, 6, 1)
    assert torch.equal(buffer.grad, weight * is_token)


@SETTINGS
@given(st.lists(st.integers(0, 5), max_size=6), WORLD_SIZES)
def test_transformer_engine(sizes, world_size):
    """Slot i of a rank, by the rule of its partitioning kernel: find the document, then its head or its tail."""
    cu = tuple(accumulate((2 * world_size * size for size in sizes), initial=0))
    found = maps.transformer_engine(torch.tensor(cu, dtype=torch.int32), world_size)
    for rank in range(world_size):
        expected = []
        for slot in range(cu[-1] // world_size):
            document = max(n for n in range(len(sizes)) if cu[n] // world_size <= slot and sizes[n])
            place, half = slot - cu[document] // world_size, (cu[document + 1] - cu[document]) // world_size // 2
            chunk = rank if place < half else 2 * world_size - 1 - rank
            expected.append(cu[document] + chunk * half + place % half)
        assert found.partition.local_index(rank).tolist() == expected
        assert found.tokens(rank).tolist() == expected
    assert not found.has_padding


@SETTINGS
@given(st.integers(0, 6), WORLD_SIZES, st.data())
def test_pytorch_head_tail(size, world_size, data):
    balancers = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    tokens = 2 * world_size * size
    cu = [0, *sorted(data.draw(st.lists(st.integers(0, tokens), max_size=4))), tokens]
    found = maps.pytorch_head_tail(cu, world_size)
    balancer = balancers._HeadTailLoadBalancer(tokens, world_size, "cpu")
    rearranged, restored = (balancer._generate_indices(restore)[0] for restore in (False, True))
    held = [found.partition.local_index(rank) for rank in range(world_size)]
    assert torch.equal(torch.cat(held), rearranged.long())
    x = torch.randn(1, tokens)
    assert torch.equal(found.partition.unshard(list(x[:, rearranged].tensor_split(world_size, 1))), x)
    assert torch.equal(x[:, rearranged][:, restored], x)


@SETTINGS
@given(st.integers(0, 6), WORLD_SIZES, st.sampled_from(["contiguous", "zigzag"]))
def test_fla(size, world_size, layout):
    tokens = 2 * world_size * size
    found = maps.fla([0, tokens // 3, tokens], world_size, layout)
    pack = torch.arange(tokens)
    for rank in range(world_size):
        shard = pack.reshape(world_size, -1)[rank] if layout == "contiguous" else head_and_tail(pack, rank, world_size)
        assert torch.equal(found.tokens(rank), shard)
        assert torch.equal(found.from_buffer(shard, rank, 0), found.partition.shard(pack, rank, 0))
        assert torch.equal(found.to_buffer(shard, rank, 0), shard)


def test_padding_of_a_layout_is_said_by_name():
    cu = [0, 5, 7]
    assert maps.megatron(cu, [0, 8, 12], 2).partition == Partition.from_padded(cu, [0, 8, 12], 2)
    for make, words in [
        (lambda: maps.transformer_engine([0, 8, 15], 2), "document 1 has 7 tokens; Transformer Engine needs a multiple "
         "of 4.*pad to 8, or use Partition.per_document_zigzag"),
        (lambda: maps.pytorch_head_tail([0, 7], 2), "7 tokens; PyTorch's head-tail load balancer .* Partition.zigzag"),
        (lambda: maps.fla([0, 7], 2), "7 tokens; FLA's contiguous layout needs a multiple of 2"),
        (lambda: maps.fla([0, 6], 2, "zigzag"), "6 tokens; FLA's zigzag layout needs a multiple of 4"),
        (lambda: maps.fla([0, 8], 2, "ring"), "layout='ring'; FLA has contiguous and zigzag"),
        (lambda: maps.megatron(cu, [0, 4, 8], 2), "document 0 has 5 tokens, padded to 4"),
        (lambda: maps.megatron(cu, [0, 8, 12], 2).from_buffer(torch.zeros(1, 7), 0), "a buffer of Megatron has 6"),
        (lambda: maps.megatron(cu, [0, 8, 12], 2).to_buffer(torch.zeros(1, 6), 0), "rank 0 holds 3"),
        (lambda: maps.fla([0, 8], 0), "world_size=0"),
    ]:  # fmt: skip
        with pytest.raises(UnsupportedProblemError, match=words):
            make()
