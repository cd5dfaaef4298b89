"""Exchanges of states on tensors: pack what a schedule says, exchange, walk, and hand back what enters each span.

Matrices lie in pools ``[matrices, K, V]``, and everything is an index into a pool. An index is made once per context,
head block size and direction. A span's matrices of the block's heads follow one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from .channel import Channel, Exchange
from .schedule import Messages, RelaySchedule, Run, WalkSchedule

Walker = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""``walk(M, B, initial, offsets)`` of one direction: (entry, exit), as ``ops.walk.walk`` returns them."""

Key = tuple[int, int]
"""(chain, place in walking order)."""


class OwnSpans(NamedTuple):
    """A rank's spans of chains in the order of its tensors: heads, inner spans, and all that a state enters."""

    heads: tuple[Key, ...]
    inner: tuple[Key, ...]
    entered: tuple[Key, ...]


class Given(NamedTuple):
    """What a rank computed for a head block, ``[n, HB, K, V]``: states leaving heads, M and B of inner spans."""

    heads: torch.Tensor
    M: torch.Tensor
    B: torch.Tensor


def _indices(runs: Iterable[Run], row_of: Mapping[Key, int], heads: int) -> list[int]:
    found: list[int] = []
    for run in runs:
        base = row_of[run.chain, run.place] * heads
        found += range(base + run.first_head, base + run.end_head)
    return found


def _num_matrices(runs: Iterable[Run]) -> int:
    return sum(run.end_head - run.first_head for run in runs)


def _rows(keys: Sequence[Key]) -> dict[Key, int]:
    return {key: row for row, key in enumerate(keys)}


class Layout:
    """Where the messages of a round lie in a pool: one after the other, by peer."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self.begin: dict[int, int] = {}
        self.end = 0
        for peer, size in sorted(sizes.items()):
            self.begin[peer] = self.end
            self.end += size
        self.sizes = dict(sizes)

    def views(self, pool: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return each peer's part of a pool."""
        return {peer: pool[begin : begin + self.sizes[peer]] for peer, begin in self.begin.items()}


def exchange(
    channel: Channel, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor], label: str
) -> Exchange:
    """Start an exchange in which the rank may be its own peer: that message is copied here."""
    own = sends.pop(channel.rank, None)
    if own is not None:
        receives.pop(channel.rank).copy_(own)
    return channel.start(sends, receives, label)


class _Base:
    def __init__(self, own: OwnSpans, heads: int, device: torch.device) -> None:
        self.own, self.heads, self.device = own, heads, device

    def tensor(self, values: Sequence[int]) -> torch.Tensor:
        """Return an index on the device."""
        return torch.tensor(values, dtype=torch.int64, device="cpu").to(self.device)


class WalkExchange(_Base):
    """``all_gather`` or ``spread`` for one head block size, direction and device.

    Each round is one selection from a pool to send, and one pool to receive into.
    """

    def __init__(
        self, schedule: WalkSchedule, own: OwnSpans, heads: int, device: torch.device, *, backward: bool
    ) -> None:
        super().__init__(own, heads, device)
        self._index_collect(schedule.collect)
        self._index_walks(schedule, backward)
        self._index_deliver(schedule.deliver)

    def _index_collect(self, collect: Messages) -> None:
        """A message of this round: states of heads, then B, then M of inner spans.

        The pool of what the rank gives has the same order.
        """
        head_rows, inner_rows = _rows(self.own.heads), _rows(self.own.inner)
        first_B = len(head_rows) * self.heads
        first_M = first_B + len(inner_rows) * self.heads
        sent: list[int] = []
        sizes = {}
        for peer, runs in sorted(collect.sends.items()):
            begin = len(sent)
            sent += _indices((run for run in runs if not run.place), head_rows, self.heads)
            inner = _indices((run for run in runs if run.place), inner_rows, self.heads)
            sent += [first_B + index for index in inner] + [first_M + index for index in inner]
            sizes[peer] = len(sent) - begin
        self.sent, self.collect_sends = self.tensor(sent), Layout(sizes)
        sizes = {
            peer: sum((run.end_head - run.first_head) * (2 if run.place else 1) for run in runs)
            for peer, runs in collect.receives.items()
        }
        self.collected = Layout(sizes)
        # Where the state or B, and the M, of a span lie in the pool, as if all heads from 0 on were there.
        self.state_at: dict[Key, int] = {}
        self.map_at: dict[Key, int] = {}
        for peer, runs in collect.receives.items():
            at = self.collected.begin[peer]
            inner_runs = [run for run in runs if run.place]
            for run in [run for run in runs if not run.place] + inner_runs:
                self.state_at[run.chain, run.place] = at - run.first_head
                at += run.end_head - run.first_head
            for run in inner_runs:
                self.map_at[run.chain, run.place] = at - run.first_head
                at += run.end_head - run.first_head

    def _index_walks(self, schedule: WalkSchedule, backward: bool) -> None:
        """A walk per (chain, head). The transposed walk runs from a chain's last fragment to its first."""
        initial: list[int] = []
        states: list[int] = []
        maps: list[int] = []
        offsets = [0]
        self.entry_at: dict[tuple[int, int, int], int] = {}
        exits: list[tuple[int, int, int]] = []
        for chain, first_head, end_head, last_place in schedule.walks:
            places = range(1, last_place)
            for head in range(first_head, end_head):
                initial.append(self.state_at[chain, 0] + head)
                for place in reversed(places) if backward else places:
                    self.entry_at[chain, place, head] = len(states)
                    states.append(self.state_at[chain, place] + head)
                    maps.append(self.map_at[chain, place] + head)
                offsets.append(len(states))
                exits.append((chain, last_place, head))
        for number, key in enumerate(exits):
            self.entry_at[key] = len(states) + number
        self.walked, self.walked_sizes = self.tensor(maps + states + initial), (len(maps), len(states), len(initial))
        self.offsets = self.tensor(offsets)

    def _index_deliver(self, deliver: Messages) -> None:
        """The pool of results: what enters fragments, and what leaves walks."""

        def results(runs: Sequence[Run]) -> list[int]:
            return [
                self.entry_at[run.chain, run.place, head]
                for run in runs
                for head in range(run.first_head, run.end_head)
            ]

        sends = {peer: results(runs) for peer, runs in sorted(deliver.sends.items())}
        self.given_back = self.tensor([index for rows in sends.values() for index in rows])
        self.deliver_sends = Layout({peer: len(rows) for peer, rows in sends.items()})
        self.delivered = Layout({peer: _num_matrices(runs) for peer, runs in deliver.receives.items()})
        at = {}
        for peer, runs in deliver.receives.items():
            place = self.delivered.begin[peer]
            for run in runs:
                for head in range(run.first_head, run.end_head):
                    at[run.chain, run.place, head] = place
                    place += 1
        self.entered = self.tensor([at[(*key, head)] for key in self.own.entered for head in range(self.heads)])

    def start(self, channel: Channel, label: str, given: Given, walk: Walker) -> Callable[[], torch.Tensor]:
        """Start with what the rank computed; the function returned ends it and gives ``[entered, HB, K, V]``."""
        size = given.B.shape[-1]
        own = torch.cat([tensor.reshape(-1, size, size) for tensor in (given.heads, given.B, given.M)])
        pool = own.new_empty((self.collected.end, size, size))
        sends = self.collect_sends.views(own.index_select(0, self.sent))
        collecting = exchange(channel, sends, self.collected.views(pool), f"{label}, collect")

        def finish() -> torch.Tensor:
            collecting.wait()
            M, B, initial = pool.index_select(0, self.walked).unsqueeze(1).split(self.walked_sizes)
            results = torch.cat(walk(M, B, initial, self.offsets)).squeeze(1)
            delivered = results.new_empty((self.delivered.end, size, size))
            sends = self.deliver_sends.views(results.index_select(0, self.given_back))
            exchange(channel, sends, self.delivered.views(delivered), f"{label}, deliver").wait()
            return delivered.index_select(0, self.entered).unflatten(0, (len(self.own.entered), self.heads))

        return finish


class _Round(NamedTuple):
    """A round of ``relay``: which inner spans walk a step first (rows of ``inner`` and of ``entered``), then messages.

    ``sends`` are rows of what leaves the spans of the round's place, ``receives`` rows of ``entered``.
    """

    inner: torch.Tensor
    entered: torch.Tensor
    offsets: torch.Tensor
    sends: dict[int, torch.Tensor]
    receives: dict[int, torch.Tensor]


class RelayExchange(_Base):
    """``relay`` for one head block size, direction and device."""

    def __init__(self, schedule: RelaySchedule, own: OwnSpans, heads: int, device: torch.device) -> None:
        super().__init__(own, heads, device)
        self.rounds = [self._round(place, messages) for place, messages in enumerate(schedule.rounds)]

    def _round(self, place: int, messages: Messages) -> _Round:
        inner_rows, entered_rows = _rows(self.own.inner), _rows(self.own.entered)
        steps = [key for key in self.own.inner if key[1] == place]
        leaving = _rows(steps if place else self.own.heads)
        return _Round(
            inner=self.tensor([inner_rows[key] for key in steps]),
            entered=self.tensor([entered_rows[key] for key in steps]),
            offsets=self.tensor(range(len(steps) + 1)),
            sends={
                peer: self.tensor([leaving[run.chain, run.place] for run in runs])
                for peer, runs in messages.sends.items()
            },
            receives={
                peer: self.tensor([entered_rows[run.chain, run.place + 1] for run in runs])
                for peer, runs in messages.receives.items()
            },
        )

    def start(self, channel: Channel, label: str, given: Given, walk: Walker) -> Callable[[], torch.Tensor]:
        """See WalkExchange."""
        entered = given.B.new_empty((len(self.own.entered), *given.B.shape[1:]))

        def begin(place: int, leaving: torch.Tensor) -> tuple[Exchange, dict[int, torch.Tensor]]:
            one = self.rounds[place]
            sends = {peer: leaving.index_select(0, rows) for peer, rows in one.sends.items()}
            arrived = {peer: entered.new_empty((len(rows), *entered.shape[1:])) for peer, rows in one.receives.items()}
            return exchange(channel, sends, dict(arrived), f"{label}, round {place}"), arrived

        under_way = begin(0, given.heads)

        def finish() -> torch.Tensor:
            waiting, arrived = under_way
            for place, one in enumerate(self.rounds):
                if place:
                    _, leaving = walk(given.M[one.inner], given.B[one.inner], entered[one.entered], one.offsets)
                    waiting, arrived = begin(place, leaving)
                waiting.wait()
                for peer, rows in one.receives.items():
                    entered.index_copy_(0, rows, arrived[peer])
            return entered

        return finish
