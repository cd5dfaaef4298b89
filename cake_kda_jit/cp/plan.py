"""The plan of a context-parallel step: what each rank computes, sends and receives, forward and backward. No torch.

A rank's spans are documents to its kernels, scanned in three phases: *heads* of chains first, since others wait for the
state that leaves them; *whole* documents while the exchange is under way; then the spans that were *entered* by a state
from elsewhere. Summaries (M, B) are made of the inner spans of chains only: what enters a head is known, and nothing
is asked of what leaves a tail.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import NamedTuple

from ..errors import UnsupportedProblemError
from .halo import HaloPlan, halo_plan
from .partition import Partition
from .schedule import (
    EXCHANGES,
    RelaySchedule,
    Traffic,
    WalkSchedule,
    cheapest,
    relay_schedule,
    traffic,
    walk_schedule,
)
from .spans import Role, Spans

CHUNK_TOKENS = 64


class Phases(NamedTuple):
    """A rank's spans by the time when they are scanned, as numbers of its own spans."""

    heads: tuple[int, ...]
    whole: tuple[int, ...]
    entered: tuple[int, ...]


class ExchangeCost(NamedTuple):
    """What one exchange takes, forward and backward: its rounds, and the bytes received by the rank that gets most.

    ``cost`` is that of both together, in bytes: see ``schedule.Traffic``.
    """

    name: str
    rounds: tuple[int, int]
    received_bytes: tuple[int, int]
    cost: int


class ParallelPlan:
    """All that a partition decides, for every rank. Immutable; parts are made when they are first asked for."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.spans = Spans(partition)
        self._numbers: dict[int, dict[Role, list[int]]] = {}

    @property
    def needs_exchange(self) -> bool:
        """Whether any document has several spans."""
        return bool(self.spans.chains)

    @cached_property
    def most_chunks(self) -> int:
        """Chunks that no rank exceeds: equal on all ranks, so that all cut heads into the same blocks."""
        partition = self.partition
        fragments = Counter(partition.ranks)
        return max(tokens // CHUNK_TOKENS + fragments[rank] for rank, tokens in enumerate(partition.tokens_by_rank))

    def numbers_of(self, rank: int, *roles: Role) -> tuple[int, ...]:
        """Return the numbers of the rank's spans of these roles, role by role, in the order of their chains."""
        if rank not in self._numbers:
            found: dict[Role, list[tuple[int, int, int]]] = {role: [] for role in Role}
            for number, span in enumerate(self.spans.of_rank(rank)):
                found[span.role].append((span.chain, span.position, number))
            self._numbers[rank] = {role: [number for *_, number in sorted(own)] for role, own in found.items()}
        return tuple(number for role in roles for number in self._numbers[rank][role])

    def phases(self, rank: int, backward: bool) -> Phases:
        """Return when a rank scans which span. Inner spans are the last of ``entered`` backward, the first forward."""
        whole = self.numbers_of(rank, Role.WHOLE)
        if backward:
            return Phases(self.numbers_of(rank, Role.LAST), whole, self.numbers_of(rank, Role.FIRST, Role.MIDDLE))
        return Phases(self.numbers_of(rank, Role.FIRST), whole, self.numbers_of(rank, Role.MIDDLE, Role.LAST))

    def place_of(self, rank: int, number: int, backward: bool) -> tuple[int, int]:
        """Return the chain of a rank's span and its place in walking order."""
        span = self.spans.of_rank(rank)[number]
        last = len(self.spans.chains[span.chain].ranks) - 1
        return span.chain, last - span.position if backward else span.position

    def schedule(self, name: str, rank: int, heads: int, backward: bool) -> WalkSchedule | RelaySchedule:
        """Return what a rank does in an exchange of a block of ``heads`` value heads."""
        chains, world_size = self.spans.chains, self.partition.world_size
        if name == "relay":
            return relay_schedule(chains, rank, heads, backward)
        return walk_schedule(name, chains, world_size, rank, heads, backward)

    def traffic(self, name: str, heads: int, backward: bool) -> Traffic:
        """Return what an exchange moves, in matrices of one head."""
        return traffic(name, self.spans.chains, self.partition.world_size, heads, backward)

    def costs(self, num_value_heads: int, head_dim: int) -> tuple[ExchangeCost, ...]:
        """Return what each exchange costs for HV heads and K = V."""
        matrix_bytes = 4 * head_dim * head_dim
        found = []
        for name in EXCHANGES:
            ways = [self.traffic(name, num_value_heads, backward) for backward in (False, True)]
            rounds = tuple(len(way.most_in_round) for way in ways)
            received = tuple(max(way.received) * matrix_bytes for way in ways)
            found.append(ExchangeCost(name, rounds, received, sum(way.cost(matrix_bytes) for way in ways)))
        return tuple(found)

    def choose(self, exchange: str, num_value_heads: int, head_dim: int) -> str:
        """Return the exchange that is asked for, or the cheapest for ``"auto"``."""
        if exchange != "auto":
            return exchange
        return cheapest((cost.name, cost.cost) for cost in self.costs(num_value_heads, head_dim))

    def halo(self, rank: int, width: int, with_state: bool) -> HaloPlan:
        """Return a rank's halos of a convolution of ``width`` taps."""
        return halo_plan(self.spans, rank, width, with_state)

    def explain(self, num_value_heads: int, head_dim: int, exchange: str = "auto") -> str:
        """Return the exchanges as a table: rounds and bytes, forward + backward, and which one is taken."""
        check_exchange(exchange)
        chosen = self.choose(exchange, num_value_heads, head_dim)
        chains, size = self.spans.chains, self.partition.world_size
        longest = max((len(chain.ranks) for chain in chains), default=1)
        lines = [
            f"{self.partition.layout}, {size} ranks: {len(chains)} of {self.partition.num_documents} documents on "
            f"several ranks, at most {longest} spans each; HV = {num_value_heads}, K = V = {head_dim}",
            f"{'exchange':12} {'rounds':>9} {'MiB received by the busiest rank':>33} {'cost in MiB':>12}",
        ]
        for cost in self.costs(num_value_heads, head_dim):
            rounds = "{} + {}".format(*cost.rounds)
            received = "{:.1f} + {:.1f}".format(*(value / 2**20 for value in cost.received_bytes))
            taken = "  <- taken" if cost.name == chosen else ""
            lines.append(f"{cost.name:12} {rounds:>9} {received:>33} {cost.cost / 2**20:12.1f}{taken}")
        return "\n".join(lines)


def check_exchange(exchange: object) -> None:
    """Raise UnsupportedProblemError for what names no exchange."""
    if not isinstance(exchange, str) or exchange not in ("auto", *EXCHANGES):
        raise UnsupportedProblemError(f"exchange={exchange!r}; use 'auto' or one of {', '.join(EXCHANGES)}")
