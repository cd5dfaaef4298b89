"""Spans and chains: what the ranks of a partition hold, as runs of consecutive tokens of one document. No torch.

Fragments that follow each other both in their document and in their rank's memory are one *span*: to the kernels a span
is a document that starts from some state. The spans of a document in sequence order, on whichever ranks, are its
*chain*; a document of a single span has none. Documents cut alike share one computation: a pack of 10,000 documents in
128 fragments each has a handful of patterns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from enum import Enum
from functools import cached_property, partial
from typing import NamedTuple

from .partition import Partition


class Role(Enum):
    """Where a span stands in its document: alone, or in a chain."""

    FIRST = "first"
    MIDDLE = "middle"
    LAST = "last"
    WHOLE = "whole"


class Chain(NamedTuple):
    """A document of several spans, and the rank of each in sequence order."""

    document: int
    ranks: tuple[int, ...]


class Span(NamedTuple):
    """Tokens ``start`` to ``end`` of the pack, half open, on one rank.

    ``chain`` is the number of the document's chain and ``position`` the span's place in it; a whole document has chain
    -1 and position 0.
    """

    document: int
    start: int
    end: int
    chain: int
    position: int
    role: Role

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        return self.end - self.start


# Several times quicker than the constructor's own checks of names and numbers.
_new_span = partial(tuple.__new__, Span)


class _Pattern(NamedTuple):
    """How a document is cut: the rank of each span, and the span of each fragment."""

    ranks: tuple[int, ...]
    positions: tuple[int, ...]


class Spans:
    """The spans of every rank of a partition, and the chains that they form. Immutable."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self._local: dict[int, tuple[Span, ...]] = {}

    @cached_property
    def first_fragments(self) -> tuple[int, ...]:
        """The number of each document's first fragment, counted along the pack; one entry more for the pack's end."""
        starts, found = self.partition.starts, 0
        numbers = []
        for start in self.partition.cu_seqlens:
            found = bisect_left(starts, start, found)
            numbers.append(found)
        return tuple(numbers)

    @cached_property
    def patterns(self) -> tuple[_Pattern, ...]:
        """How each document is cut; equal ones are one object. An empty document has no span here."""
        ranks, bounds, joined = self.partition.ranks, self.first_fragments, self._joined
        known: dict[tuple, _Pattern] = {}
        found = []
        for begin, end in zip(bounds, bounds[1:]):
            key = ranks[begin:end]
            full_key = key if joined is None else (key, joined[begin:end])
            pattern = known.get(full_key)
            if pattern is None:
                pattern = known[full_key] = _pattern_of(key, None if joined is None else joined[begin:end])
            found.append(pattern)
        return tuple(found)

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        """All chains, in the order of their documents."""
        return tuple(Chain(n, pattern.ranks) for n, pattern in enumerate(self.patterns) if len(pattern.ranks) > 1)

    @cached_property
    def chain_of_document(self) -> dict[int, int]:
        """The chain of each document that has one."""
        return {chain.document: number for number, chain in enumerate(self.chains)}

    @cached_property
    def _joined(self) -> tuple[bool, ...] | None:
        """Whether each fragment follows the one before it in memory, if a rank's memory has an order of its own."""
        partition = self.partition
        if partition.order is None:
            return None
        joined = [False] * partition.num_fragments
        for numbers in partition.numbers_by_rank:
            for before, after in zip(numbers, numbers[1:]):
                joined[after] = joined[after] or after == before + 1
        return tuple(joined)

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """Return the rank's spans in the order of its memory; rank 0 holds the empty documents too, at the end."""
        if rank not in self._local:
            found = self._nonempty(rank)
            if rank == 0:
                cu = self.partition.cu_seqlens
                found += [Span(n, cu[n], cu[n], -1, 0, Role.WHOLE) for n, p in enumerate(self.patterns) if not p.ranks]
            self._local[rank] = tuple(found)
        return self._local[rank]

    def position_of(self, fragment: int) -> tuple[int, int]:
        """Return the document of a fragment and its span's place in the document."""
        document = bisect_right(self.first_fragments, fragment) - 1
        return document, self.patterns[document].positions[fragment - self.first_fragments[document]]

    def _nonempty(self, rank: int) -> list[Span]:
        starts, ends, position_of = self.partition.starts, self.partition.ends, self.position_of
        found: list[Span] = []
        begun: tuple[int, int] | None = None
        start = end = 0
        for number in self.partition.numbers_of_rank(rank):
            place = position_of(number)
            if place != begun:
                if begun is not None:
                    found.append(self._span(*begun, start, end))
                begun, start = place, starts[number]
            end = ends[number]
        if begun is not None:
            found.append(self._span(*begun, start, end))
        return found

    def _span(self, document: int, position: int, start: int, end: int) -> Span:
        length = len(self.patterns[document].ranks)
        if length == 1:
            return _new_span((document, start, end, -1, 0, Role.WHOLE))
        role = Role.FIRST if position == 0 else Role.LAST if position == length - 1 else Role.MIDDLE
        return _new_span((document, start, end, self.chain_of_document[document], position, role))

    def local_starts(self, rank: int) -> tuple[int, ...]:
        """Return where each of the rank's spans begins in its local tensor."""
        found, total = [], 0
        for span in self.of_rank(rank):
            found.append(total)
            total += span.num_tokens
        return tuple(found)


def _pattern_of(ranks: tuple[int, ...], joined: tuple[bool, ...] | None) -> _Pattern:
    spans: list[int] = []
    positions = []
    for index, rank in enumerate(ranks):
        continues = index > 0 and spans[-1] == rank and (joined is None or joined[index])
        if not continues:
            spans.append(rank)
        positions.append(len(spans) - 1)
    return _Pattern(tuple(spans), tuple(positions))
