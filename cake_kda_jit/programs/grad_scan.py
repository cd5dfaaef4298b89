"""``grad_scan``: two scans in one launch: states and v' again from checkpoints, and state gradients in reverse."""

from __future__ import annotations

from ..record import Field, Limits, Program, cpu_entry
from .common import cpu_tile_records, sm90_tile_records, smxx_tile_records
from .tile_fields import BETA, HEAD_BLOCK, PREPARED_TILES, READY, TABLES

FIELDS = (
    PREPARED_TILES
    + (
        READY,
        Field("v", "ptr", "[T, HV, V]; read by the replay only"),
        Field("beta", "ptr", "[T, HV]"),
        Field("do_", "ptr", "[T, HV, V] gradient of o"),
    )
    + TABLES
    + (
        Field("checkpoints", "ptr", "[rows, HV, V, K] fp32 of chunk_scan; null: no replay"),
        Field("h", "ptr", "[HB, chunks, V, K] tile, written by the replay"),
        Field("v_new", "ptr", "[HB, chunks, 64 (bf16: 128), V] tile, written by the replay"),
        Field("dfinal_state", "ptr", "[N, HV, K, V] fp32 or null: gradient leaving each document's last segment"),
        Field("segment_dexit", "ptr", "[summary rows, HV, K, V] fp32: gradient leaving the other segments, or null"),
        Field("dS", "ptr", "[HB, chunks, V, K] tile: gradient of the state leaving each chunk"),
        Field("z", "ptr", "[HB, chunks, 64 (bf16: 96), V] tile: Tinv^T (Aqk^T do + kg dS)"),
        Field("dinitial_state", "ptr", "[N, HV, K, V] fp32 or null"),
        Field("v_strides", "strides(3)", "elements per token, head, channel"),
        Field("beta_strides", "strides(2)", "elements per token, head"),
        Field("do_strides", "strides(3)", "elements per token, head, channel"),
        Field("num_chunks", "i64", "rows of chunk_table"),
        Field("num_segments", "i64", "rows of segment_table"),
    )
    + HEAD_BLOCK
    + BETA
    + (Field("checkpoint_chunks", "i32", "chunks between two checkpoints"),)
)

ENTRY = cpu_entry(FIELDS)

# nvcc 13.0 spills nothing. 13.5 spills four registers in the wide form of K = 128, whose warpgroups have 168 each.
SM90_LIMITS = Limits(max_spill_bytes=32)

PROGRAM = Program(
    name="grad_scan",
    summary="replay of h and v' per checkpoint interval, and the reverse scan of dS and z per segment",
    records=cpu_tile_records("grad_scan", ENTRY)
    + smxx_tile_records("grad_scan", FIELDS)
    + sm90_tile_records("grad_scan", FIELDS, SM90_LIMITS),
)
