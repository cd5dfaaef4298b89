"""What a partition means: which rank holds which tokens, and what each fragment needs from others. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

from ..ops.pack import Fragment
from .plan import ParallelPlan

if TYPE_CHECKING:
    from .partition import Partition

MOST_LINES = 64


class FragmentNote(NamedTuple):
    """A fragment, its first local token, and what it needs.

    ``predecessor`` is the fragment of the same document before it, whose state it continues, or None. ``halo`` are the
    tokens that its convolution reads before its own, each with the rank that holds it.
    """

    fragment: Fragment
    local_start: int
    predecessor: Fragment | None
    halo: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Explanation:
    """A partition in words and numbers: print it, or take it ``as_json``. Made by ``Partition.explain``."""

    partition: Partition
    conv_width: int
    num_value_heads: int
    head_dim: int

    @cached_property
    def plan(self) -> ParallelPlan:
        """What the ranks exchange for it."""
        return ParallelPlan(self.partition)

    @cached_property
    def tokens_per_rank(self) -> tuple[int, ...]:
        """How many tokens each rank holds."""
        return tuple(map(self.partition.num_local_tokens, range(self.partition.world_size)))

    @property
    def imbalance(self) -> float:
        """Tokens of the fullest rank over the mean of all; 1.0 is even."""
        tokens = self.partition.num_tokens
        return max(self.tokens_per_rank) * self.partition.world_size / tokens if tokens else 1.0

    def notes(self, rank: int) -> Iterator[FragmentNote]:
        """Return a note on each of the rank's fragments, in the order of its memory."""
        partition = self.partition
        numbers = partition.numbers_by_rank[rank]
        local_starts = accumulate((partition.ends[n] - partition.starts[n] for n in numbers), initial=0)
        for number, local_start in zip(numbers, local_starts):
            before = self._fragment(number - 1) if number else None
            fragment = self._fragment(number)
            predecessor = before if before and before.document == fragment.document else None
            yield FragmentNote(fragment, local_start, predecessor, self._halo(number))

    def as_json(self) -> dict[str, object]:
        """Return all of it as plain lists and numbers; ranges of tokens are half open."""
        partition = self.partition
        return {
            "layout": partition.layout,
            "world_size": partition.world_size,
            "num_tokens": partition.num_tokens,
            "num_documents": partition.num_documents,
            "digest": partition.digest(),
            "conv_width": self.conv_width,
            "tokens_per_rank": list(self.tokens_per_rank),
            "imbalance": self.imbalance,
            "exchange": self._exchange_as_json(),
            "ranks": [[_note_as_json(note) for note in self.notes(rank)] for rank in range(partition.world_size)],
        }

    def __str__(self) -> str:
        partition = self.partition
        lines = [
            f"{partition.layout}: {_count(partition.num_tokens, 'token')} in "
            f"{_count(partition.num_documents, 'document')} on {_count(partition.world_size, 'rank')}, "
            f"{_count(partition.num_fragments, 'fragment')}",
            f"imbalance {self.imbalance:.3f}: the fullest rank holds {max(self.tokens_per_rank)} tokens, the emptiest "
            f"{min(self.tokens_per_rank)}, the mean {partition.num_tokens / partition.world_size:g}",
            "",
            *_aligned(_RANK_HEAD, self._rank_rows(), partition.world_size, "ranks"),
            "",
            self.plan.explain(self.num_value_heads, self.head_dim),
            "",
            *_aligned(self._fragment_head(), self._fragment_rows(), partition.num_fragments, "fragments"),
        ]
        return "\n".join(lines)

    def _exchange_as_json(self) -> dict[str, object]:
        costs = self.plan.costs(self.num_value_heads, self.head_dim)
        return {
            "num_value_heads": self.num_value_heads,
            "head_dim": self.head_dim,
            "num_chains": len(self.plan.spans.chains),
            "taken": self.plan.choose("auto", self.num_value_heads, self.head_dim),
            "exchanges": [_plain(cost._asdict()) for cost in costs],
        }

    def _fragment(self, number: int) -> Fragment:
        p = self.partition
        return Fragment(p.documents[number], p.starts[number], p.ends[number], p.ranks[number])

    def _halo(self, number: int) -> tuple[tuple[int, int], ...]:
        partition = self.partition
        start = partition.starts[number]
        first = max(partition.cu_seqlens[partition.documents[number]], start - self.conv_width + 1)
        holders = []
        for token in reversed(range(first, start)):
            # A fragment may be shorter than the halo, so each token has its own holder.
            while partition.starts[number] > token:
                number -= 1
            holders.append((token, partition.ranks[number]))
        return tuple(reversed(holders))

    def _rank_rows(self) -> Iterator[tuple[str, ...]]:
        for rank, tokens in enumerate(self.tokens_per_rank):
            numbers = self.partition.numbers_by_rank[rank]
            documents = len({self.partition.documents[number] for number in numbers})
            yield str(rank), str(tokens), str(len(numbers)), str(documents)

    def _fragment_head(self) -> tuple[str, ...]:
        halo = f"conv halo of width {self.conv_width} (token@rank)"
        return "rank", "local tokens", "pack tokens", "document", "continues", halo

    def _fragment_rows(self) -> Iterator[tuple[str, ...]]:
        for rank in range(self.partition.world_size):
            for fragment, local_start, before, halo in self.notes(rank):
                yield (
                    str(rank),
                    f"[{local_start}, {local_start + fragment.num_tokens})",
                    f"[{fragment.start}, {fragment.end})",
                    str(fragment.document),
                    f"[{before.start}, {before.end})@{before.rank}" if before else "the initial state",
                    " ".join(f"{token}@{holder}" for token, holder in halo) or "-",
                )


_RANK_HEAD = ("rank", "tokens", "fragments", "documents")


def _plain(values: dict[str, object]) -> dict[str, object]:
    """Return a dictionary with lists in place of tuples, as JSON gives it back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _note_as_json(note: FragmentNote) -> dict[str, object]:
    return {
        **note.fragment._asdict(),
        "local_start": note.local_start,
        "predecessor": note.predecessor._asdict() if note.predecessor else None,
        "halo": [list(pair) for pair in note.halo],
    }


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _aligned(head: tuple[str, ...], rows: Iterator[tuple[str, ...]], total: int, what: str) -> list[str]:
    """Return the first rows of a table as aligned text, and how many more there are."""
    lines = [head, *islice(rows, MOST_LINES)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    if total > MOST_LINES:
        text.append(f"... and {total - MOST_LINES} more {what}; as_json() has all")
    return text
