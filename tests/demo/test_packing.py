"""Packs: fixed size, no document mixed with another, every next byte predicted once."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from cake_kda_jit.demo.packing import Pack, pack_documents, shuffled_forever


def documents_of(pack: Pack) -> list[tuple[bytes, bytes]]:
    """Inputs and targets of each document of a pack."""
    ranges = zip(pack.cu_seqlens, pack.cu_seqlens[1:])
    return [(pack.inputs[start:end], pack.targets[start:end]) for start, end in ranges]


def random_documents(seed: int) -> list[bytes]:
    """Documents of 1 to 40 bytes; document n consists of the byte n alone, so that mixing would be seen."""
    generator = random.Random(seed)
    return [bytes([n]) * generator.randint(1, 40) for n in range(100)]


@pytest.mark.parametrize("tokens", [1, 7, 32, 64])
def test_documents_never_mix_and_packs_are_full(tokens):
    packs = list(pack_documents(random_documents(tokens), tokens))
    for pack in packs:
        assert pack.cu_seqlens[0] == 0 and pack.cu_seqlens[-1] == len(pack.inputs) == len(pack.targets)
        for inputs, targets in documents_of(pack):
            assert inputs, "no empty documents"
            assert len(set(inputs + targets)) == 1, "a target crossed into another document"
    assert all(len(pack.inputs) == tokens for pack in packs[:-1])
    assert 0 < len(packs[-1].inputs) <= tokens


@pytest.mark.parametrize("tokens", [1, 5, 16, 1000])
def test_every_pair_of_neighbours_is_trained_on_once_and_in_order(tokens):
    generator = random.Random(3)
    documents = [generator.randbytes(length) for length in (0, 1, 2, 3, 17, 40, 16, 1, 5)]
    expected = [pair for document in documents for pair in zip(document, document[1:])]
    packs = pack_documents(documents, tokens)
    assert [pair for pack in packs for pair in zip(pack.inputs, pack.targets)] == expected


def test_the_order_follows_the_seed_and_every_round_holds_every_document():
    documents = [bytes([n]) for n in range(20)]

    def rounds(seed):
        stream = list(islice(shuffled_forever(documents, seed), 40))
        return stream[:20], stream[20:]

    first, second = rounds(5)
    assert sorted(first) == sorted(second) == documents
    assert first != second
    assert rounds(5) == (first, second)
    assert rounds(6) != (first, second)
