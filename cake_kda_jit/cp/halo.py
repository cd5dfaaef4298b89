"""Halos of the convolution: the tokens before each span, found token by token. No torch.

A convolution of width W needs the W - 1 tokens before a span. Those of its own document come from whichever ranks hold
them: a span shorter than W - 1 makes the next halo reach over several. Slots before the document's first token are
those of its initial state, which the rank with that first token holds. Backward the same list is followed the other
way: gradients of the slots go to the holders of the tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from .spans import Span, Spans


class Slot(NamedTuple):
    """A halo's slot that a rank fills: the span ``span`` of its own, counted from 0, and slot 0 to W - 2."""

    span: int
    slot: int


class Source(NamedTuple):
    """What fills a slot: a token of a span, as ``slot`` of its last W - 1, or a ``slot`` of the initial state.

    ``span`` is the holder's own span, counted from 0, and ``token`` its local token; of a state ``token`` is -1 and
    ``span`` the document's number. ``layer`` counts the sources of the same token or slot: contributions to its
    gradient are added in the order of the layers, which is that of the spans they come from.
    """

    span: int
    token: int
    slot: int
    layer: int

    @property
    def is_state(self) -> bool:
        """Whether it is a slot of an initial state."""
        return self.token < 0


class HaloPlan(NamedTuple):
    """What one rank gives to and gets from each peer, in the same order on both sides. It may be its own peer."""

    sends: dict[int, list[Source]]
    receives: dict[int, list[Slot]]


def halo_plan(spans: Spans, rank: int, width: int, with_state: bool) -> HaloPlan:
    """Return a rank's halos for a convolution of ``width`` taps; ``with_state``: documents have initial states."""
    return HaloPlan(_sends(spans, rank, width - 1, with_state), _receives(spans, rank, width - 1, with_state))


def _receives(spans: Spans, rank: int, reach: int, with_state: bool) -> dict[int, list[Slot]]:
    partition = spans.partition
    cu, starts, ranks = partition.cu_seqlens, partition.starts, partition.ranks
    found: dict[int, list[tuple[int, int, Slot]]] = {}
    for number, span in enumerate(spans.of_rank(rank)):
        first = cu[span.document]
        if span.start == first:
            continue
        for slot in range(reach):
            token = span.start - reach + slot
            if token < first and not with_state:
                continue
            holder = ranks[bisect_right(starts, max(token, first)) - 1]
            found.setdefault(holder, []).append((span.start, slot, Slot(number, slot)))
    return {holder: [slot for *_, slot in sorted(slots)] for holder, slots in found.items()}


def _sends(spans: Spans, rank: int, reach: int, with_state: bool) -> dict[int, list[Source]]:
    cu = spans.partition.cu_seqlens
    local_starts = spans.local_starts(rank)
    found: dict[int, list[tuple[int, int, Source]]] = {}
    for number, span in enumerate(spans.of_rank(rank)):
        layers: dict[int, int] = {}
        first = cu[span.document]
        for start, target in _spans_behind(spans, span, reach):
            # A state's slots stand where tokens before the document would.
            begin = first - reach if with_state and span.start == first else span.start
            for token in range(max(begin, start - reach), span.end):
                layer = layers[token] = layers.get(token, -1) + 1
                if token < first:
                    source = Source(span.document, -1, token - (first - reach), layer)
                else:
                    source = Source(
                        number, local_starts[number] + token - span.start, token - (span.end - reach), layer
                    )
                found.setdefault(target, []).append((start, token - (start - reach), source))
    return {target: [source for *_, source in sorted(sources)] for target, sources in found.items()}


def _spans_behind(spans: Spans, span: Span, reach: int) -> list[tuple[int, int]]:
    """The (first token, rank) of the later spans of a document whose halos may reach this one."""
    partition = spans.partition
    starts, last = partition.starts, span.position
    end_fragment = spans.first_fragments[span.document + 1]
    number = bisect_right(starts, span.end - 1)
    found = []
    while number < end_fragment and starts[number] < span.end + reach:
        _, position = spans.position_of(number)
        if position != last:
            found.append((starts[number], partition.ranks[number]))
            last = position
        number += 1
    return found
