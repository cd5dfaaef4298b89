"""The tables of a rank's spans: which rows a launch has, and in which order."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit import Partition
from cake_kda_jit.cp.plan import ParallelPlan
from cake_kda_jit.cp.tables import NO_DOCUMENT, LocalTables, PhaseTables, make_tables
from cake_kda_jit.ops.plan import PlanHeads

LENGTHS = (40_000, 0, 300, 90_000, 7_000)
RANKS = 3


def tables_of(rank: int, *, has_checkpoints: bool) -> LocalTables:
    boundaries = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    plan = ParallelPlan(Partition.per_document_zigzag(boundaries, RANKS))
    heads = PlanHeads(64, 64, 64)
    return make_tables(plan, rank, heads, torch.device("cpu"), has_checkpoints=has_checkpoints)


def phases(tables: LocalTables) -> list[PhaseTables]:
    return [tables.inner, *tables.forward, *tables.backward]


def of_documents(table: torch.Tensor) -> list[list[int]]:
    return [row for row in table.tolist() if row[0] != NO_DOCUMENT]


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_launch_has_the_rows_of_its_spans_long_segments_first(rank):
    tables, kept = tables_of(rank, has_checkpoints=False), tables_of(rank, has_checkpoints=True)
    for mine, every in zip(phases(tables), phases(kept)):
        rows = mine.segment_table.tolist()
        assert sorted(rows) == sorted(of_documents(every.segment_table))
        documents = [row[0] for row in rows]
        assert len([1 for one, other in zip(documents, documents[1:]) if one != other]) + bool(rows) == mine.size
        chunks = {document: max(row[2] for row in rows if row[0] == document) for document in documents}
        assert [chunks[document] for document in documents] == sorted(map(chunks.get, documents), reverse=True)
        for document in documents:
            first_chunks = [row[1] for row in rows if row[0] == document]
            assert first_chunks == sorted(first_chunks), "segments of a span stand in its order"
    has_segments = len(tables.forward.entered.segment_table) > tables.forward.entered.size
    assert has_segments == (rank == RANKS - 1), "the last rank's two parts of a document follow one another: long spans"


@pytest.mark.parametrize("rank", range(RANKS))
def test_rows_of_checkpoints_are_those_of_all_spans(rank):
    tables = tables_of(rank, has_checkpoints=True)
    for phase in phases(tables):
        assert phase.segment_table[:, 1:].equal(tables.all.segment_table[:, 1:])


@pytest.mark.parametrize("rank", range(RANKS))
def test_every_summary_row_is_written_once(rank):
    tables = tables_of(rank, has_checkpoints=False)
    assert sorted(tables.summarized[:, 3].tolist()) == list(range(tables.num_summaries))
