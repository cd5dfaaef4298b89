"""``chunk_scan``: the recurrence over the chunks of every segment, and o."""

from __future__ import annotations

from ..record import Field, Limits, Program, cpu_entry
from .common import cpu_tile_records, sm90_tile_records, smxx_tile_records
from .tile_fields import BETA, HEAD_BLOCK, PREPARED_TILES, READY, TABLES

FIELDS = (
    PREPARED_TILES
    + (
        READY,
        Field("v", "ptr", "[T, HV, V]"),
        Field("beta", "ptr", "[T, HV]"),
    )
    + TABLES
    + (
        Field("initial_state", "ptr", "[N, HV, K, V] fp32 or null: state entering each document's first segment"),
        Field("segment_entry", "ptr", "[summary rows, HV, K, V] fp32: state entering the other segments, or null"),
        Field("o", "ptr", "[T, HV, V] contiguous, dtype of v"),
        Field("final_state", "ptr", "[N, HV, K, V] fp32 or null"),
        Field("h", "ptr", "[HB, chunks, V, K] tile: state entering each chunk, or null"),
        Field("v_new", "ptr", "[HB, chunks, 64 (bf16: 128), V] tile: v', or null"),
        Field("checkpoints", "ptr", "[rows, HV, V, K] fp32, row floor(first chunk / interval) + j + segment, or null"),
        Field("v_strides", "strides(3)", "elements per token, head, channel"),
        Field("beta_strides", "strides(2)", "elements per token, head"),
        Field("num_chunks", "i64", "rows of chunk_table"),
        Field("num_segments", "i64", "rows of segment_table"),
    )
    + HEAD_BLOCK
    + BETA
    + (Field("checkpoint_chunks", "i32", "chunks between two checkpoints j, counted from the segment's first"),)
)

ENTRY = cpu_entry(FIELDS)

# nvcc 13.0 spills nothing. For sm_120a 13.5 spills 124 bytes, stores and loads, in the wide form of K = 128.
SMXX_LIMITS = Limits(max_spill_bytes=128)

PROGRAM = Program(
    name="chunk_scan",
    summary="states, v' and o, one task per (segment, value head)",
    records=cpu_tile_records("chunk_scan", ENTRY)
    + smxx_tile_records("chunk_scan", FIELDS, SMXX_LIMITS)
    + sm90_tile_records("chunk_scan", FIELDS),
)
