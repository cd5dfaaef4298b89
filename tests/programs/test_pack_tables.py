"""pack_tables (cpu) against the same tables written in Python, document by document."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cake_kda_jit.errors import UnsupportedProblemError

from .pipeline import CHUNK, launch, make_tables, record_of, table_values

RECORD = record_of("pack_tables", "int64")
NO_DOCUMENT = [-1, 0, 0]


def expected_tables(lengths, segment_tokens, minimum=0, summarize_all=0, most_segments=0):
    """(chunk rows, segment rows, first summary row of each document)."""
    chunks, segments, offsets, token = [], [], [0], 0
    for document, length in enumerate(lengths):
        is_cut = segment_tokens and length >= minimum
        starts = list(range(0, length, segment_tokens)) if is_cut else [0]
        every = 1
        while most_segments and len(starts) > most_segments:
            every *= 2
            starts = list(range(0, length, every * segment_tokens))
        starts = starts or [0]
        has_summary = summarize_all or len(starts) > 1
        for n, start in enumerate(starts):
            end = starts[n + 1] if n + 1 < len(starts) else length
            first_chunk = len(chunks)
            for row in range(start, end, CHUNK):
                chunks.append([document, token + row, min(CHUNK, end - row), len(segments)])
            summary_row = offsets[-1] + n if has_summary else -1
            segments.append([document, first_chunk, len(chunks) - first_chunk, summary_row])
        offsets.append(offsets[-1] + (len(starts) if has_summary else 0))
        token += length
    return chunks, segments, offsets


@pytest.mark.parametrize("summarize_all", [0, 1])
@pytest.mark.parametrize("most_segments", [0, 2, 3])
@pytest.mark.parametrize("minimum", [0, 200, 10_000])
@pytest.mark.parametrize("segment_tokens", [0, 64, 128])
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0), (64,), (65, 0, 1, 200, 63, 64, 3, 0), (128, 129, 385, 199)])
def test_tables_of_the_exact_size(lengths, segment_tokens, minimum, most_segments, summarize_all):
    options = {"minimum": minimum, "most_segments": most_segments, "summarize_all": summarize_all}
    tables = make_tables(lengths, segment_tokens, **options)
    chunks, segments, offsets = expected_tables(lengths, segment_tokens, **options)
    assert tables.chunk_table.tolist() == chunks
    assert tables.segment_table.tolist() == segments
    assert tables.summary_offsets.tolist() == offsets


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 400), max_size=8),
    segment_chunks=st.integers(0, 4),
    minimum=st.integers(0, 300),
    most_segments=st.integers(0, 4),
    spare=st.integers(0, 3),
)
def test_rows_past_the_last_used_one_have_no_document(lengths, segment_chunks, minimum, most_segments, spare):
    cut = {"minimum": minimum, "most_segments": most_segments}
    chunks, segments, offsets = expected_tables(lengths, segment_chunks * CHUNK, **cut)
    values, tables = table_values(
        lengths,
        segment_chunks * CHUNK,
        max_chunks=len(chunks) + spare,
        max_segments=len(segments) + spare,
        **cut,
    )
    launch(RECORD, values)
    assert tables.chunk_table.tolist() == chunks + [[*NO_DOCUMENT, 0]] * spare
    assert tables.segment_table.tolist() == segments + [[*NO_DOCUMENT, -1]] * spare
    assert tables.summary_offsets.tolist() == offsets


def test_a_documents_cut_depends_on_its_own_length_only():
    """The segments of 300 tokens, counted from the document's first chunk, are the same in every pack."""

    def own_segments(lengths, document):
        rows = [row for row in make_tables(lengths, 128, minimum=200).segments() if row[0] == document]
        return [(first_chunk - rows[0][1], chunks) for _, first_chunk, chunks, _ in rows]

    assert own_segments((300,), 0) == own_segments((1, 300, 5000), 1) == own_segments((700, 0, 300), 2)


BAD_ADDRESSES_AND_SIZES = {
    "segment length": ({"segment_tokens": 100}, "segment_tokens is 100; use a multiple of 64"),
    "negative segment": ({"segment_tokens": -64}, "segment_tokens is -64"),
    "negative number": ({"most_segments": -1}, "most_segments is -1; use 0 for any number"),
    "documents": ({"num_documents": -1}, "num_documents is -1"),
    "no boundaries": ({"cu_seqlens": None}, "cu_seqlens is null"),
    "no offsets": ({"summary_offsets": None}, "summary_offsets is null"),
    "no table": ({"chunk_table": None}, "chunk_table is null"),
    "no segments": ({"segment_table": None}, "segment_table is null"),
}
BAD = BAD_ADDRESSES_AND_SIZES | {
    "chunks": ({"max_chunks": 3}, "the pack has 4 chunks and 3 segments; the tables have rows for 3 and 3"),
    "segments": ({"max_segments": 2}, "the tables have rows for 4 and 2"),
    "not from 0": ({"cu_seqlens": torch.tensor([1, 201, 211])}, "cu_seqlens starts at 1"),
    "decreasing": ({"cu_seqlens": torch.tensor([0, 200, 199])}, "decreases from 200 to 199 at document 1"),
    "past int32": ({"cu_seqlens": torch.tensor([0, 200, 2**31])}, "2147483648 tokens"),
    "no threads": ({"num_threads": 0}, "num_threads is 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused(case):
    change, message = BAD[case]
    values, _ = table_values((150, 10), 128, max_chunks=4, max_segments=3)
    launch(RECORD, values)
    with pytest.raises(UnsupportedProblemError, match=message):
        launch(RECORD, values | change)
