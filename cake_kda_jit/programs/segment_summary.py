"""``segment_summary``: each segment as a map of the state, S_out = M S_in + B; backwards dS_in = M^T dS_out + D."""

from __future__ import annotations

from ..record import Field, Program, cpu_entry
from .common import cpu_tile_records, sm90_tile_records, smxx_tile_records
from .tile_fields import BETA, HEAD_BLOCK, PREPARED_TILES, TABLES

FIELDS = (
    PREPARED_TILES  # qg and Aqk are read backwards only
    + (
        Field("v", "ptr", "[T, HV, V]; read forwards only"),
        Field("beta", "ptr", "[T, HV]"),
        Field("do_", "ptr", "[T, HV, V] gradient of o; read backwards only"),
    )
    + TABLES
    + (
        Field("M", "ptr", "[summary rows, HV, K, K] fp32, or null: not wanted"),
        Field("B", "ptr", "[summary rows, HV, K, V] fp32: B forwards, D backwards, or null: not wanted"),
        Field("v_strides", "strides(3)", "elements per token, head, channel"),
        Field("beta_strides", "strides(2)", "elements per token, head"),
        Field("do_strides", "strides(3)", "elements per token, head, channel"),
        Field("num_chunks", "i64", "rows of chunk_table"),
        Field("num_segments", "i64", "rows of segment_table"),
    )
    + HEAD_BLOCK
    + BETA
    + (
        Field("backward", "i32", "1: B receives D, the state gradient at the segment's start for none at its end"),
        Field("skip_first_M", "i32", "1: M of a document's first segment is not wanted"),
        Field("skip_first_B", "i32", "1: B of a document's first segment is not wanted"),
        Field("skip_last_B", "i32", "1: B of a document's last segment is not wanted"),
    )
)

ENTRY = cpu_entry(FIELDS)

PROGRAM = Program(
    name="segment_summary",
    summary="M and B (or D) of every segment with a summary row, one task per (segment, value head, M or B)",
    records=cpu_tile_records("segment_summary", ENTRY)
    + smxx_tile_records("segment_summary", FIELDS)
    + sm90_tile_records("segment_summary", FIELDS),
)
