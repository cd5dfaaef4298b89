"""What ``bench cp`` measures: the six published packs, on 2 to 16 ranks, in three layouts, at two boundaries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from ..cp.options import KcpOptions
from ..cp.partition import Partition
from ..cp.passes import RANK_LIMIT
from .core import Row

PACKS = {
    "Q1": (61440, 100003, 32768, 55645),
    "Q2": (150017, 76319),
    "Q3": (80001, 12345, 65536, 30000, 9999, 64167),
    "Q4": (131073, 40000, 69087),
    "Q5": (100000, 50001, 33333, 60007, 11667),
    "Q6": (200000, 49856),
}
"""Document lengths. Totals and counts are those of FlashInfer's pull request 7176; the lengths in a pack are ours."""
HEADS = 96
HEAD_DIM = 128
RANKS = (2, 4, 8, 16)
LAYOUTS = ("contiguous", "zigzag", "per_document_zigzag")
ARMS = ("tf32_hilo", "bf16x3_hw64")
BOUNDARIES = ("B1", "B3")
"""B1: the module's forward, that is halos, three convolutions, states, recurrence. B3: that, replay and backward."""
SESSIONS = (1, 2)
NS_PER_TOKEN_HEAD = {"B1": 1.6, "B3": 6.4}
"""About what one takes on an H200 with K = V = 128: for the order of magnitude of the time left."""
RANK_SECONDS = 0.03
"""What a rank's tables and first run take beside its timed runs, about."""


@dataclass(frozen=True)
class Unit:
    """What is measured at a time: both boundaries and all arms of one pack, number of ranks and layout."""

    pack: str
    ranks: int
    layout: str
    session: int

    @property
    def name(self) -> str:
        """``Q1, CP 4, zigzag``."""
        return f"{self.pack}, CP {self.ranks}, {self.layout}"

    @property
    def key(self) -> tuple:
        """What tells units apart."""
        return self.pack, self.ranks, self.layout, self.session


@dataclass(frozen=True)
class Sizes:
    """What a run takes of each pack: heads, K = V, tokens (None: all), and the most bytes of scratch, as options do."""

    heads: int = HEADS
    head_dim: int = HEAD_DIM
    tokens: int | None = None
    workspace_limit: int | None = None

    @property
    def name(self) -> str:
        """``H = HV = 96, K = V = 128, bf16, 6.4 GB of scratch``."""
        scratch = (self.workspace_limit or RANK_LIMIT) / 1e9
        shortened = "" if self.tokens is None else f", packs shortened to {self.tokens} tokens"
        return f"H = HV = {self.heads}, K = V = {self.head_dim}, bf16, {scratch:g} GB of scratch{shortened}"

    @property
    def options(self) -> KcpOptions:
        """The options of a rank's context."""
        return KcpOptions(backward="replay", workspace_limit=self.workspace_limit)

    def lengths(self, pack: str) -> tuple[int, ...]:
        """Return the pack's document lengths, in proportion where ``tokens`` is given."""
        lengths = PACKS[pack]
        if self.tokens is None:
            return lengths
        cuts = [end * self.tokens // sum(lengths) for end in accumulate(lengths, initial=0)]
        return tuple(end - start for start, end in zip(cuts, cuts[1:]))

    def partition(self, unit: Unit) -> Partition:
        """Return who holds what in a unit."""
        boundaries = list(accumulate(self.lengths(unit.pack), initial=0))
        return getattr(Partition, unit.layout)(boundaries, unit.ranks)

    def most_tokens(self, units: Iterable[Unit]) -> int:
        """Return the tokens that no rank of any unit exceeds."""
        partitions = (self.partition(unit) for unit in units)
        return max(one.num_local_tokens(rank) for one in partitions for rank in range(one.world_size))

    def seconds(self, unit: Unit, num_arms: int, runs: int) -> float:
        """Return about what a unit takes on an H200: all ranks one after the other, and a first run of each."""
        token_heads = sum(self.lengths(unit.pack)) * self.heads
        each = num_arms * runs * sum(NS_PER_TOKEN_HEAD.values()) + NS_PER_TOKEN_HEAD["B3"]
        return token_heads * each * 1e-9 + unit.ranks * RANK_SECONDS


@dataclass(frozen=True)
class CpRow(Row):
    """A time of one arm in one session. ``ms`` is that of the slowest rank, ``rank_ms`` every rank's median.

    ``bytes`` is what the rank that gets most receives. ``exchange_ms`` is the same rank's exchanges with nothing beside
    them; ``alone_ms`` its work with copies in place of exchanges, None for virtual ranks, which do nothing else.
    ``ahead`` is the share of runs that the host had handed to the device before the device began with them, None where
    it waits for exchanges.
    """

    pack: str = ""
    tokens: int = 0
    documents: int = 0
    heads: int = 0
    cp: int = 0
    layout: str = ""
    boundary: str = ""
    session: int = 1
    rank_ms: tuple[float, ...] = ()
    exchange_ms: float = 0.0
    alone_ms: float | None = None
    ahead: float | None = None


def units_in_order(
    packs: Sequence[str], ranks: Sequence[int], layouts: Sequence[str], sessions: Sequence[int]
) -> list[Unit]:
    """Return all units so that a table that is cut short says the most.

    Sessions follow each other. In each, one pack comes first, whole: it shows scaling and the cost of layouts. Then the
    others at the fewest and at the most ranks, then at those between.
    """
    ends = sorted(ranks, key=lambda one: (one not in (min(ranks), max(ranks)), one))
    first, others = packs[:1], packs[1:]
    found = []
    for session in sessions:
        found += [Unit(*one, session) for one in product(first, ends, layouts)]
        found += [Unit(pack, size, layout, session) for size, pack, layout in product(ends, others, layouts)]
    # On one rank all layouts are the same.
    return [unit for unit in found if unit.ranks > 1 or unit.layout == layouts[0]]


class Estimate:
    """The time left, from what units were expected to take and took."""

    def __init__(self, expected: Iterable[float]) -> None:
        self._expected = list(expected)
        self._done = 0
        self._took = 0.0

    def finished(self, seconds: float) -> None:
        """Count the next unit."""
        self._done += 1
        self._took += seconds

    @property
    def factor(self) -> float:
        """How much longer units took than expected."""
        return self._took / sum(self._expected[: self._done]) if self._done else 1.0

    @property
    def following(self) -> float:
        """What the next unit is likely to take."""
        return self.factor * self._expected[self._done]

    @property
    def left(self) -> float:
        """What all units not yet finished are likely to take."""
        return self.factor * sum(self._expected[self._done :])
