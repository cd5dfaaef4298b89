"""How states travel along chains: who sends which matrices to whom, in which round. No torch.

A chain is walked from its *head*, whose own state leaves it ready to use, over *inner* spans, which change a state by
their summary, to its *tail*. Forward the head is the document's first span, backward its last; ``place`` counts spans
in walking order. Every span but the head needs the state that enters it. Three exchanges give the same bits:

- ``all_gather``, one round: each rank gets the head's state and the summaries of all spans before its own, and walks.
- ``spread``, two rounds: each rank walks an equal share of the (chain, head) pairs and hands out what enters each span.
- ``relay``, a round per place: each rank applies its own summary and passes the state on.

Amounts are counted in matrices ``[K, V]`` of one value head: a state is one, the summary of an inner span two (M, B).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from .spans import Chain

EXCHANGES = ("all_gather", "spread", "relay")

HOP_BYTES = 4 << 20
"""What a round costs beside its bytes: about 20 us of launches and latency, at 200 GB/s."""


class Run(NamedTuple):
    """What one span gives or gets, for value heads ``first_head`` to ``end_head`` of a head block."""

    chain: int
    place: int
    first_head: int
    end_head: int


class Piece(NamedTuple):
    """A share of a chain: ``walker`` walks these heads from the head of the chain to ``last_place``."""

    walker: int
    first_head: int
    end_head: int
    last_place: int


# Several times quicker than the constructor's own checks of names and numbers.
_new_piece = partial(tuple.__new__, Piece)


class Walk(NamedTuple):
    """A piece that a rank walks itself; it finds what enters places 1 to ``last_place``."""

    chain: int
    first_head: int
    end_head: int
    last_place: int


class Messages(NamedTuple):
    """One round of a rank: runs to and from each peer, in the same order on both sides. The rank may be its own peer.

    What a run of ``collect`` holds is the head's state, or B and M of an inner span; elsewhere it is one state.
    """

    sends: dict[int, list[Run]]
    receives: dict[int, list[Run]]


class WalkSchedule(NamedTuple):
    """``all_gather`` and ``spread`` on one rank: collect summaries, walk, deliver states."""

    collect: Messages
    walks: tuple[Walk, ...]
    deliver: Messages


class RelaySchedule(NamedTuple):
    """``relay`` on one rank: in round i, states leave spans of place i and enter spans of place i + 1."""

    rounds: tuple[Messages, ...]


class Traffic(NamedTuple):
    """What an exchange moves between ranks, in matrices: received by each rank, and at most in each round."""

    received: tuple[int, ...]
    most_in_round: tuple[int, ...]

    def cost(self, matrix_bytes: int) -> int:
        """Return the bytes that the busiest rank waits for, a round's latency being ``HOP_BYTES``."""
        return sum(HOP_BYTES + most * matrix_bytes for most in self.most_in_round)


def walking_ranks(chain: Chain, backward: bool) -> tuple[int, ...]:
    """Return the rank at each place."""
    return chain.ranks[::-1] if backward else chain.ranks


# ---- who walks what --------------------------------------------------------------------------------------------------


def gather_pieces(ranks: Sequence[int], heads: int) -> list[Piece]:
    """Return a piece per rank that needs a state: all heads, as far as its own last span."""
    last_places = {rank: place for place, rank in enumerate(ranks)}
    return [Piece(rank, 0, heads, place) for rank, place in sorted(last_places.items()) if place > 0]


def spread_pieces(chains: Sequence[Chain], world_size: int, heads: int) -> Iterator[list[Piece]]:
    """Yield each chain's pieces: all (chain, head) pairs in a row, cut in ``world_size`` shares of equal length.

    A pair counts its spans but one.
    """
    total = heads * sum(len(chain.ranks) - 1 for chain in chains)
    begin = 0
    for chain in chains:
        weight = len(chain.ranks) - 1
        pieces, head = [], 0
        while head < heads:
            walker = (begin + head * weight) * world_size // total
            # The first head whose share is a later one.
            end = min(heads, -(-((walker + 1) * total - begin * world_size) // (weight * world_size)))
            pieces.append(_new_piece((walker, head, end, weight)))
            head = end
        yield pieces
        begin += heads * weight


class _Alike(NamedTuple):
    """Chains that share their ranks: these, in walking order, and how many chains there are."""

    ranks: tuple[int, ...]
    count: int


def _group(chains: Sequence[Chain], backward: bool) -> dict[int, _Alike]:
    """Return chains cut alike as one, by the identity of their ``ranks``: comparing long tuples takes its time."""
    distinct = {id(chain.ranks): chain for chain in chains}
    counts = Counter(id(chain.ranks) for chain in chains)
    return {key: _Alike(walking_ranks(chain, backward), counts[key]) for key, chain in distinct.items()}


def _all_pieces(name: str, chains: Sequence[Chain], world_size: int, heads: int, groups: dict[int, _Alike]):
    """Yield (key of the group, pieces) of each chain."""
    keys = (id(chain.ranks) for chain in chains)
    if name == "spread":
        yield from zip(keys, spread_pieces(chains, world_size, heads))
    else:
        pieces = {key: gather_pieces(alike.ranks, heads) for key, alike in groups.items()}
        for key in keys:
            yield key, pieces[key]


# ---- schedules -------------------------------------------------------------------------------------------------------


def walk_schedule(
    name: str, chains: Sequence[Chain], world_size: int, rank: int, heads: int, backward: bool
) -> WalkSchedule:
    """Return what a rank does in ``all_gather`` or ``spread``."""
    collect, deliver = Messages({}, {}), Messages({}, {})
    walks = []
    groups = _group(chains, backward)
    places_of = {
        key: [place for place, holder in enumerate(alike.ranks) if holder == rank] for key, alike in groups.items()
    }
    for number, (key, pieces) in enumerate(_all_pieces(name, chains, world_size, heads, groups)):
        ranks, own_places = groups[key].ranks, places_of[key]
        for piece in pieces:
            share = (piece.first_head, piece.end_head)
            here = piece.walker == rank
            if here:
                walks.append(Walk(number, *share, piece.last_place))
            for place in range(len(ranks)) if here else own_places:
                run = Run(number, place, *share)
                if place < piece.last_place:
                    _note(collect, run, ranks[place], piece.walker, rank)
                if 0 < place <= piece.last_place and (name == "spread" or ranks[place] == piece.walker):
                    _note(deliver, run, piece.walker, ranks[place], rank)
    return WalkSchedule(collect, tuple(walks), deliver)


def relay_schedule(chains: Sequence[Chain], rank: int, heads: int, backward: bool) -> RelaySchedule:
    """Return what a rank does in ``relay``."""
    rounds: list[Messages] = []
    for number, chain in enumerate(chains):
        ranks = walking_ranks(chain, backward)
        rounds += [Messages({}, {}) for _ in range(len(ranks) - 1 - len(rounds))]
        if rank not in ranks:
            continue
        for place, (source, target) in enumerate(zip(ranks, ranks[1:])):
            _note(rounds[place], Run(number, place, 0, heads), source, target, rank)
    return RelaySchedule(tuple(rounds))


def _note(messages: Messages, run: Run, source: int, target: int, rank: int) -> None:
    if source == rank:
        messages.sends.setdefault(target, []).append(run)
    if target == rank:
        messages.receives.setdefault(source, []).append(run)


# ---- what they move --------------------------------------------------------------------------------------------------


def traffic(name: str, chains: Sequence[Chain], world_size: int, heads: int, backward: bool) -> Traffic:
    """Return what an exchange of all ranks moves, without making its schedules; chains cut alike are counted once."""
    if not chains:
        return Traffic((0,) * world_size, ())
    groups = _group(chains, backward)
    if name == "relay":
        rounds = _relay_rounds(groups.values(), world_size, heads)
    elif name == "spread":
        rounds = _spread_rounds(groups, chains, world_size, heads)
    else:
        rounds = [_gather_round(groups.values(), world_size, heads)]
    return Traffic(tuple(map(sum, zip(*rounds))), tuple(map(max, rounds)))


def _matrices_before(place: int) -> int:
    """Matrices of the spans before a place: one of the head, two of each inner span."""
    return max(0, 2 * place - 1)


def _gather_round(groups: Iterable[_Alike], world_size: int, heads: int) -> list[int]:
    received = [0] * world_size
    for ranks, count in groups:
        last_places = {rank: place for place, rank in enumerate(ranks)}
        need = {rank: _matrices_before(place) for rank, place in last_places.items()}
        for place, rank in enumerate(ranks):
            if place < last_places[rank]:
                need[rank] -= 2 if place else 1
        for rank, matrices in need.items():
            received[rank] += count * heads * matrices
    return received


def _relay_rounds(groups: Iterable[_Alike], world_size: int, heads: int) -> list[list[int]]:
    rounds: list[list[int]] = []
    for ranks, count in groups:
        rounds += [[0] * world_size for _ in range(len(ranks) - 1 - len(rounds))]
        for received, source, target in zip(rounds, ranks, ranks[1:]):
            if source != target:
                received[target] += count * heads
    return rounds


def _spread_rounds(groups: dict[int, _Alike], chains: Sequence[Chain], world_size: int, heads: int) -> list[list[int]]:
    collected, delivered = [0] * world_size, [0] * world_size
    own: dict[int, tuple[Counter, Counter]] = {}
    for key, (ranks, count) in groups.items():
        given = Counter({ranks[0]: 1}) + Counter(ranks[1:-1]) + Counter(ranks[1:-1])
        needed = Counter(ranks[1:])
        own[key] = (given, needed)
        for rank, states in needed.items():
            delivered[rank] += count * heads * states
    for key, pieces in _all_pieces("spread", chains, world_size, heads, groups):
        given, needed = own[key]
        for walker, first_head, end_head, last_place in pieces:
            collected[walker] += (end_head - first_head) * (_matrices_before(last_place) - given[walker])
            delivered[walker] -= (end_head - first_head) * needed[walker]
    return [collected, delivered]


def cheapest(costs: Iterable[tuple[str, int]]) -> str:
    """Return the name of the lowest cost; the first of equal ones."""
    return min(costs, key=lambda one: one[1])[0]
