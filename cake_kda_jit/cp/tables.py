"""The tables of one rank's spans on its device: to the programs, spans are documents.

A phase is a launch over some of the spans: its segment table has their rows, spans of long segments first, so that
processors do not wait for one that began last. Where checkpoints are kept, which are numbered by the rows of all spans,
segments keep their rows and the others' are marked as of no document. Documents and summary rows are numbered so that
those of each phase, forward and backward, follow one another: first spans, inner ones, last ones, whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ..ops.plan import PlanHeads, plan_of_boundaries
from ..ops.select import SegmentRule, segment_rule
from .plan import ParallelPlan
from .spans import Role

NO_DOCUMENT = -1
NO_SUMMARY_ROW = -1
INNER_RULE = SegmentRule(8192, 16384)
"""How inner spans are cut where documents are not: they have summaries anyway, so only a walk is added."""
ROLES_IN_ORDER = (Role.FIRST, Role.MIDDLE, Role.LAST, Role.WHOLE)


class PhaseTables(NamedTuple):
    """Some of a rank's spans, in the order in which a launch numbers them as documents.

    ``documents`` are those of the pack that they belong to and ``places`` theirs in the phase of all spans, int64
    ``[n]``; ``is_cut``: some span has several segments; ``summary_rows`` ``(first, end)`` are theirs. ``segment_table``
    ``[segments, 4]`` int32 and ``summary_offsets`` ``[n + 1]`` int64 are as in a ``Plan``.
    """

    spans: tuple[int, ...]
    documents: torch.Tensor
    places: torch.Tensor
    is_cut: bool
    summary_rows: tuple[int, int]
    segment_table: torch.Tensor
    summary_offsets: torch.Tensor

    @property
    def size(self) -> int:
        """How many spans it has."""
        return len(self.spans)


class DirectionTables(NamedTuple):
    """The phases of a forward or of a backward."""

    heads: PhaseTables
    whole: PhaseTables
    entered: PhaseTables


class LocalTables(NamedTuple):
    """All tables of a rank. ``chunk_table`` is as in a ``Plan``; ``all`` has every span, ``inner`` the middle ones.

    ``num_summaries`` counts summary rows: those of inner spans, and of spans that are cut in segments; the segments
    themselves are in ``summarized``, as in a ``segment_table``.
    """

    chunk_table: torch.Tensor
    num_summaries: int
    summarized: torch.Tensor
    all: PhaseTables
    inner: PhaseTables
    forward: DirectionTables
    backward: DirectionTables


class _Maker:
    def __init__(self, plan: ParallelPlan, rank: int, heads: PlanHeads, device: torch.device) -> None:
        self.spans = plan.spans.of_rank(rank)
        self.device = device
        rule = segment_rule(heads.num_value_heads, heads.head_dim)
        inner_rule = rule if rule.segment_tokens else INNER_RULE
        rules = [inner_rule if span.role is Role.MIDDLE else rule for span in self.spans]
        self.num_segments = [one.num_segments(span.num_tokens) for one, span in zip(rules, self.spans)]
        self.segment_tokens = [one.tokens_of(span.num_tokens) for one, span in zip(rules, self.spans)]
        # A segment begins with a chunk as a document does: tables of both are those of a pack of segments.
        boundaries = [
            start + segment * tokens
            for start, tokens, count in zip(plan.spans.local_starts(rank), self.segment_tokens, self.num_segments)
            for segment in range(count)
        ]
        total = sum(span.num_tokens for span in self.spans)
        self.local = plan_of_boundaries([*boundaries, total], heads, device, SegmentRule(0, 0))
        self.first_rows: dict[int, int] = {}
        self.num_rows: dict[int, int] = {}
        self.order = plan.numbers_of(rank, *ROLES_IN_ORDER)
        self.place_of = {number: place for place, number in enumerate(self.order)}
        row = 0
        for number in self.order:
            count = self.num_segments[number]
            needs_rows = count > 1 or self.spans[number].role is Role.MIDDLE
            self.first_rows[number], self.num_rows[number] = row, count if needs_rows else 0
            row += self.num_rows[number]
        self.num_summaries = row
        self.summary_rows = [
            self.first_rows[number] + segment if self.num_rows[number] else NO_SUMMARY_ROW
            for number, count in enumerate(self.num_segments)
            for segment in range(count)
        ]

    def tensor(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return integers on the device."""
        return torch.tensor(values, dtype=dtype, device="cpu").to(self.device)

    def all_rows(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return the segment table of all spans, in which only these are documents, in their order."""
        place = {number: index for index, number in enumerate(numbers)}
        documents = [
            place.get(number, NO_DOCUMENT) for number, count in enumerate(self.num_segments) for _ in range(count)
        ]
        table = self.local.segment_table.clone()
        table[:, 0] = self.tensor(documents, torch.int32)
        table[:, 3] = self.tensor(self.summary_rows, torch.int32)
        return table

    def own_rows(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return the segment table of these spans, documents in their order; spans of long segments stand first."""
        first_segments = list(accumulate(self.num_segments, initial=0))
        by_length = sorted(numbers, key=lambda number: -self.segment_tokens[number])
        kept = [
            first_segments[number] + segment for number in by_length for segment in range(self.num_segments[number])
        ]
        return self.all_rows(numbers).index_select(0, self.tensor(kept))

    def phase(self, numbers: tuple[int, ...], rows: Callable[[Sequence[int]], torch.Tensor]) -> PhaseTables:
        """Return the tables of spans whose summary rows, if any, follow one another in this order."""
        first = self.first_rows[numbers[0]] if numbers else 0
        offsets = list(accumulate((self.num_rows[number] for number in numbers), initial=first))
        return PhaseTables(
            spans=numbers,
            documents=self.tensor([self.spans[number].document for number in numbers]),
            places=self.tensor([self.place_of[number] for number in numbers]),
            is_cut=any(self.num_segments[number] > 1 for number in numbers),
            summary_rows=(first, offsets[-1]),
            segment_table=rows(numbers),
            summary_offsets=self.tensor(offsets),
        )


def make_tables(
    plan: ParallelPlan, rank: int, heads: PlanHeads, device: torch.device, *, has_checkpoints: bool
) -> LocalTables:
    """Return a rank's tables for H, HV and K on a device."""
    maker = _Maker(plan, rank, heads, device)
    rows = maker.all_rows if has_checkpoints else maker.own_rows
    forward, backward = (
        DirectionTables(*(maker.phase(numbers, rows) for numbers in plan.phases(rank, way))) for way in (False, True)
    )
    return LocalTables(
        chunk_table=maker.local.chunk_table,
        num_summaries=maker.num_summaries,
        summarized=maker.own_rows([number for number in maker.order if maker.num_rows[number]]),
        all=maker.phase(maker.order, maker.all_rows),
        inner=maker.phase(plan.numbers_of(rank, Role.MIDDLE), rows),
        forward=forward,
        backward=backward,
    )
