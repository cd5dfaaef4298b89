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

PoolWalker = Callable[["WalkExchange", torch.Tensor], torch.Tensor]
"""``walk(exchange, taken)``: M and B of all steps and the initial states, by which to fill a pool that it returns.

In it stand what enters the steps, what leaves the chains, and room for what others find: see ``WalkExchange``.
"""

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


class _Steps(NamedTuple):
    """Rows ``first``, ``first + stride``, ...: those of a run of heads. A pack has too many of them for a list."""

    first: int
    stride: int
    count: int


def _expanded(steps: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """Return all rows of all steps, int64, on the CPU."""
    if not steps:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    first, stride, count = torch.tensor(steps, dtype=torch.int64, device="cpu").unbind(1)
    passed = torch.arange(int(count.sum()), device="cpu") - (count.cumsum(0) - count).repeat_interleave(count)
    return first.repeat_interleave(count) + stride.repeat_interleave(count) * passed


def _steps_of(runs: Iterable[Run], row_of: Mapping[Key, int], heads: int, first_row: int = 0) -> list[_Steps]:
    """Where runs lie in a pool of whole spans, all ``heads`` of each, from ``first_row`` on."""
    return [
        _Steps(first_row + row_of[run.chain, run.place] * heads + run.first_head, 1, run.end_head - run.first_head)
        for run in runs
    ]


def _num_matrices(runs: Iterable[Run]) -> int:
    return sum(run.end_head - run.first_head for run in runs)


def _rows(keys: Sequence[Key]) -> dict[Key, int]:
    return {key: row for row, key in enumerate(keys)}


class Layout:
    """Where the messages of a round lie in a pool: one after the other, by peer, from ``first`` on."""

    def __init__(self, sizes: Mapping[int, int], first: int = 0) -> None:
        self.first = first
        self.begin: dict[int, int] = {}
        self.end = first
        for peer, size in sorted(sizes.items()):
            self.begin[peer] = self.end
            self.end += size
        self._sizes = [sizes[peer] for peer in self.begin]

    def views(self, pool: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return each peer's part of a pool that ends with them."""
        return dict(zip(self.begin, (pool[self.first :] if self.first else pool).split_with_sizes(self._sizes)))


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

    def rows(self, steps: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Return the rows of steps, on the device."""
        return _expanded(steps).to(self.device)


class _Walked(NamedTuple):
    """A rank's walks of one chain: its heads, and where what they find lies in the pool of results.

    What enters inner places stands head by head, place by place, from ``entries`` on; what leaves, from ``exits`` on.
    """

    first_head: int
    last_place: int
    entries: int
    exits: int


class WalkExchange(_Base):
    """``all_gather`` or ``spread`` for one head block size, direction and device.

    Each round is one selection from a pool to send, and a pool to receive into behind what the rank has itself, from
    which the next step selects both. ``delivers``: what ranks walk they send on, so that there is a second round.
    """

    def __init__(
        self,
        schedule: WalkSchedule,
        own: OwnSpans,
        heads: int,
        device: torch.device,
        *,
        rank: int,
        delivers: bool,
        backward: bool,
    ) -> None:
        super().__init__(own, heads, device)
        self.rank, self.delivers = rank, delivers
        self._index_collect(schedule.collect)
        self._index_walks(schedule, backward)
        self._index_deliver(schedule.deliver)

    def _index_collect(self, collect: Messages) -> None:
        """A message of this round: states of heads, then B, then M of inner spans.

        What the rank gives stands in the pool in the same order, and what it receives behind it.
        """
        head_rows, inner_rows = _rows(self.own.heads), _rows(self.own.inner)
        first_B = len(head_rows) * self.heads
        first_M = first_B + len(inner_rows) * self.heads
        self.num_own = first_M + len(inner_rows) * self.heads
        sent: list[_Steps] = []
        sizes = {}
        for peer, runs in sorted(collect.sends.items()):
            if peer == self.rank:
                continue
            inner = [run for run in runs if run.place]
            sent += _steps_of((run for run in runs if not run.place), head_rows, self.heads)
            sent += _steps_of(inner, inner_rows, self.heads, first_B)
            sent += _steps_of(inner, inner_rows, self.heads, first_M)
            sizes[peer] = _num_matrices(runs) + _num_matrices(inner)
        self.sent, self.collect_sends = self.rows(sent), Layout(sizes)
        sizes = {
            peer: sum((run.end_head - run.first_head) * (2 if run.place else 1) for run in runs)
            for peer, runs in collect.receives.items()
            if peer != self.rank
        }
        self.collected = Layout(sizes, self.num_own)
        # Where the state or B, and the M, of a span lie in the pool, as if all heads from 0 on were there.
        self.state_at: dict[Key, int] = {key: row * self.heads for key, row in head_rows.items()}
        self.state_at |= {key: first_B + row * self.heads for key, row in inner_rows.items()}
        self.map_at: dict[Key, int] = {key: first_M + row * self.heads for key, row in inner_rows.items()}
        for peer, at in self.collected.begin.items():
            runs = collect.receives[peer]
            inner = [run for run in runs if run.place]
            for run in [run for run in runs if not run.place] + inner:
                self.state_at[run.chain, run.place] = at - run.first_head
                at += run.end_head - run.first_head
            for run in inner:
                self.map_at[run.chain, run.place] = at - run.first_head
                at += run.end_head - run.first_head

    def _index_walks(self, schedule: WalkSchedule, backward: bool) -> None:
        """A walk per (chain, head). The transposed walk runs from a chain's last fragment to its first."""
        self.backward = backward
        initial: list[_Steps] = []
        states, maps = [], []
        offsets: list[_Steps] = [_Steps(0, 1, 1)]
        self.walked: dict[int, _Walked] = {}
        num_entries = num_walks = 0
        for chain, first_head, end_head, last_place in schedule.walks:
            places, count = range(1, last_place), end_head - first_head
            heads = torch.arange(first_head, end_head, device="cpu").unsqueeze(1)
            order = reversed(places) if backward else places
            at = [(self.state_at[chain, place], self.map_at[chain, place]) for place in order]
            for found, base in zip((states, maps), zip(*at)):
                found.append((torch.tensor(base, device="cpu") + heads).flatten())
            initial.append(_Steps(self.state_at[chain, 0] + first_head, 1, count))
            offsets.append(_Steps(num_entries + len(places), len(places), count))
            self.walked[chain] = _Walked(first_head, last_place, num_entries, num_walks)
            num_entries, num_walks = num_entries + count * len(places), num_walks + count
        self.num_entries, self.num_found = num_entries, num_entries + num_walks
        self.taken = torch.cat([*maps, *states, _expanded(initial)]).to(self.device)
        self.offsets = self.rows(offsets)

    def _found(self, runs: Iterable[Run]) -> list[_Steps]:
        """Where the pool of results has what enters spans: entries of walks, then what leaves them."""
        steps = []
        for run in runs:
            first_head, last_place, entries, exits = self.walked[run.chain]
            head, count, inner = run.first_head - first_head, run.end_head - run.first_head, last_place - 1
            if run.place == last_place:
                steps.append(_Steps(self.num_entries + exits + head, 1, count))
            else:
                position = inner - run.place if self.backward else run.place - 1
                steps.append(_Steps(entries + head * inner + position, inner, count))
        return steps

    def _index_deliver(self, deliver: Messages) -> None:
        """What enters fragments, from the walks' results to the ranks; without a second round, to this one alone.

        What others found stands behind the rank's own results.
        """
        whole = [Run(*key, 0, self.heads) for key in self.own.entered]
        sends, receives = (
            {peer: runs for peer, runs in messages.items() if self.delivers and peer != self.rank}
            for messages in (deliver.sends, deliver.receives)
        )
        self.given_back = self.rows([one for _, runs in sorted(sends.items()) for one in self._found(runs)])
        self.deliver_sends = Layout({peer: _num_matrices(runs) for peer, runs in sends.items()})
        self.delivered = Layout({peer: _num_matrices(runs) for peer, runs in receives.items()}, self.num_found)
        if not self.delivers:
            self.entered = self.rows(self._found(whole))
            return
        parts: dict[Key, list[tuple[int, _Steps]]] = {}
        for run in deliver.receives.get(self.rank, ()):
            parts.setdefault((run.chain, run.place), []).append((run.first_head, *self._found([run])))
        for peer, at in self.delivered.begin.items():
            for run in receives[peer]:
                count = run.end_head - run.first_head
                parts.setdefault((run.chain, run.place), []).append((run.first_head, _Steps(at, 1, count)))
                at += count
        self.entered = self.rows([one for key in self.own.entered for _, one in sorted(parts[key])])

    def start(self, channel: Channel, label: str, given: Given, walk: PoolWalker) -> Callable[[], torch.Tensor]:
        """Start with what the rank computed; the function returned ends it and gives ``[entered, HB, K, V]``."""
        size = given.B.shape[-1]
        pool = given.B.new_empty((self.collected.end, size, size))
        own = [tensor.reshape(-1, size, size) for tensor in (given.heads, given.B, given.M)]
        torch.cat(own, out=pool[: self.num_own])
        sends = self.collect_sends.views(pool.index_select(0, self.sent))
        collecting = channel.start(sends, self.collected.views(pool), f"{label}, collect")

        def finish() -> torch.Tensor:
            collecting.wait()
            results = walk(self, pool.index_select(0, self.taken))
            if self.delivers:
                sends = self.deliver_sends.views(results.index_select(0, self.given_back))
                channel.start(sends, self.delivered.views(results), f"{label}, deliver").wait()
            return results.index_select(0, self.entered).view(len(self.own.entered), self.heads, size, size)

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
