"""Halos of the convolution: the tokens before each span, found token by token. No torch.

A convolution of width W needs the W - 1 tokens before a span. Those of its own document come from whichever ranks hold
them: a span shorter than W - 1 makes the next halo reach over several. Slots before the document's first token are
those of its initial state, which the rank with that first token holds. Backward the same list is followed the other
way: gradients of the slots go to the holders of the tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from .spans import Span, Spans

Slot = tuple[int, int, int]
"""``(order, span, slot)``: a halo's slot that a rank fills, 0 to W - 2, of its own span, counted from 0.

``order`` counts the slots of all halos along the pack, so that both sides have the same. Plain tuples, because a pack
of many documents has a great many of them and the garbage collector passes those over.
"""

Source = tuple[int, int, int, int, int]
"""``(order, span, token, slot, layer)``: what fills the slot of this order.

It is the holder's local ``token``, of its ``span``, as ``slot`` of that span's last W - 1; or, where ``token`` is -1, a
``slot`` of the initial state of document ``span``. ``layer`` counts the sources of the same token or slot:
contributions to its gradient are added in the order of the layers, which is that of the spans they come from.
"""


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
    found: dict[int, list[Slot]] = {}
    for number, span in enumerate(spans.of_rank(rank)):
        first, start = cu[span.document], span.start
        if start == first:
            continue
        fragment = bisect_right(starts, start) - 1
        for slot in reversed(range(reach)):
            token = start - reach + slot
            if token < first and not with_state:
                break
            while starts[fragment] > max(token, first):
                fragment -= 1
            found.setdefault(ranks[fragment], []).append((start * reach + slot, number, slot))
    return {peer: sorted(some) for peer, some in found.items()}


def _sends(spans: Spans, rank: int, reach: int, with_state: bool) -> dict[int, list[Source]]:
    cu = spans.partition.cu_seqlens
    local_starts = spans.local_starts(rank)
    found: dict[int, list[Source]] = {}
    for number, span in enumerate(spans.of_rank(rank)):
        document, begin, end = span[:3]
        first, shift = cu[document], local_starts[number] - begin
        layers: dict[int, int] = {}
        if with_state and begin == first:
            begin = first - reach  # a state's slots stand where tokens before the document would
        for start, target in _spans_behind(spans, span, reach):
            messages = found.setdefault(target, [])
            # In the order of the target's slots, which are its tokens from start - reach on.
            key = start * reach - (start - reach)
            for token in range(max(begin, start - reach), end):
                layer = layers[token] = layers.get(token, -1) + 1
                if token < first:
                    messages.append((key + token, document, -1, token - (first - reach), layer))
                else:
                    messages.append((key + token, number, token + shift, token - (end - reach), layer))
    return {peer: sorted(some) for peer, some in found.items()}


def _spans_behind(spans: Spans, span: Span, reach: int) -> Iterable[tuple[int, int]]:
    """The (first token, rank) of the later spans of a document whose halos may reach this one."""
    chain = span.chain
    if chain < 0:
        return
    starts, ranks = spans.partition.starts, spans.chains[chain].ranks
    positions, end_fragment = spans.patterns[span.document].positions, spans.first_fragments[span.document + 1]
    first_fragment, last, limit = spans.first_fragments[span.document], span.position, span.end + reach
    number = bisect_right(starts, span.end - 1)
    while number < end_fragment and starts[number] < limit:
        position = positions[number - first_fragment]
        if position != last:
            yield starts[number], ranks[position]
            last = position
        number += 1
