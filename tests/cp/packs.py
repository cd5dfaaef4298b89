"""Random packs, and who holds which token, written once more: one token at a time, from the definition alone."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import strategies as st

from cake_kda_jit import Partition

LAYOUTS = ("contiguous", "zigzag", "per_document_zigzag")


@st.composite
def packs(draw, max_documents: int = 8, max_length: int = 40) -> tuple[int, ...]:
    """Boundaries of a pack in which empty documents and documents of one token are frequent."""
    length = st.one_of(st.sampled_from((0, 1)), st.integers(0, max_length))
    lengths = draw(st.lists(length, max_size=max_documents))
    return tuple(accumulate(lengths, initial=0))


@st.composite
def custom_partitions(draw) -> tuple[Partition, list[tuple[int, int, int]]]:
    """A partition of random ranges, given in random order, and the ranges."""
    cu = draw(packs())
    cuts = sorted(draw(st.sets(st.integers(0, cu[-1]), max_size=12)) | {0, cu[-1]})
    world_size = draw(st.integers(1, 9))
    ranges = [(draw(st.integers(0, world_size - 1)), start, end) for start, end in zip(cuts, cuts[1:])]
    ranges = draw(st.permutations(ranges))
    return Partition.from_fragments(cu, ranges, world_size), ranges


def chunks(tokens: list[int], number: int) -> list[list[int]]:
    """Tokens in chunks, the first ``len(tokens) % number`` of them one longer."""
    found, rest = [], list(tokens)
    for index in range(number):
        size = len(tokens) // number + (index < len(tokens) % number)
        found.append(rest[:size])
        rest = rest[size:]
    return found


def tokens_of_ranks(layout: str, cu: tuple[int, ...], world_size: int) -> list[list[int]]:
    """The tokens of each rank in the order of its memory."""
    pack, double = range(cu[-1]), 2 * world_size
    held: list[list[int]] = [[] for _ in range(world_size)]
    for rank in range(world_size):
        if layout == "contiguous":
            held[rank] += [t for t in pack if rank * cu[-1] // world_size <= t < (rank + 1) * cu[-1] // world_size]
        elif layout == "zigzag":
            for span in (rank, double - 1 - rank):
                held[rank] += [t for t in pack if span * cu[-1] // double <= t < (span + 1) * cu[-1] // double]
        else:
            for start, end in zip(cu, cu[1:]):
                cut = chunks(list(range(start, end)), double)
                held[rank] += cut[rank] + cut[double - 1 - rank]
    return held
