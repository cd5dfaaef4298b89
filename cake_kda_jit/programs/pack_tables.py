"""``pack_tables``: the tables of a pack, made on its device from the document boundaries."""

from __future__ import annotations

from ..arch import CPU_ARCHES, CUDA_ARCHES
from ..record import Entry, Field, Limits, Program, Record, cpu_entry, make_params

FIELDS = (
    Field("cu_seqlens", "ptr", "[N + 1] int64: first token of each document"),
    Field("chunk_table", "ptr", "[max_chunks, 4] int32: document (-1: none), first token, tokens, segment"),
    Field("segment_table", "ptr", "[max_segments, 4] int32: document (-1: none), first chunk, chunks, summary row"),
    Field("summary_offsets", "ptr", "[N + 1] int64: first summary row of each document"),
    Field("num_documents", "i64", "N"),
    Field("max_chunks", "i64", "rows of chunk_table"),
    Field("max_segments", "i64", "rows of segment_table"),
    Field("segment_tokens", "i32", "tokens of a segment, a multiple of 64; 0: a document is one segment"),
    Field("segment_minimum", "i32", "documents shorter than this are one segment"),
    Field("most_segments", "i32", "of a document; where more, each is 2, 4, 8 ... times as long; 0: any number"),
    Field("summarize_all", "i32", "1: every segment has a summary row; 0: those of documents of several segments"),
)

ENTRY = cpu_entry(FIELDS)

PROGRAM = Program(
    name="pack_tables",
    summary="chunk -> document and tokens, segment -> chunks, document -> summary rows; every document has a segment",
    records=(
        Record(
            program="pack_tables",
            variant="int64",
            family="cpu",
            params=make_params(),
            archs=CPU_ARCHES,
            template="cpu/pack_tables.cpp.jinja",
            entry=ENTRY,
            limits=Limits(max_spill_bytes=None),
        ),
        Record(
            program="pack_tables",
            variant="int64",
            family="smxx",
            params=make_params(),
            archs=CUDA_ARCHES,
            template="smxx/pack_tables.cu.jinja",
            entry=Entry(FIELDS),
        ),
    ),
    bytes_note="8 per document, 16 per chunk and per segment",
)
