"""``chunk_grad``: every input's gradient from the states and state gradients at each chunk's edges."""

from __future__ import annotations

from dataclasses import replace

from ..arch import ARCHES
from ..record import Field, Limits, Program, Record, cpu_entry
from .common import cpu_tile_records, smxx_tile_records
from .tile_fields import BETA, GATE, HEAD_BLOCK

FIELDS = (
    (
        Field("q", "ptr", "[T, H, K]"),
        Field("k", "ptr", "[T, H, K]"),
        Field("v", "ptr", "[T, HV, V]"),
        Field("g", "ptr", "[T, HV, K]"),
        Field("beta", "ptr", "[T, HV]"),
        Field("do_", "ptr", "[T, HV, V] gradient of o"),
        Field("A_log", "ptr", "[HV] fp32 or null"),
        Field("dt_bias", "ptr", "[HV, K] fp32 or null"),
        Field("chunk_table", "ptr", "[chunks, 4] int32: document (-1: none), first token, tokens, segment"),
        Field("h", "ptr", "[HB, chunks, V, K] tile: state entering each chunk"),
        Field("v_new", "ptr", "[HB, chunks, 64 (bf16: 128), V] tile: v'"),
        Field("dS", "ptr", "[HB, chunks, V, K] tile: gradient of the state leaving each chunk"),
        Field("z", "ptr", "[HB, chunks, 64 (bf16: 96), V] tile"),
        Field("dq", "ptr", "[T, H, K] contiguous, dtype of q"),
        Field("dk", "ptr", "[T, H, K] contiguous, dtype of q"),
        Field("dv", "ptr", "[T, HV, V] contiguous, dtype of q"),
        Field("dg", "ptr", "[T, HV, K] contiguous, dtype of g"),
        Field("dbeta", "ptr", "[T, HV] contiguous, dtype of beta"),
        Field("partial_A_log", "ptr", "[chunks, HV] fp32 or null"),
        Field("partial_dt_bias", "ptr", "[chunks, HV, K] fp32 or null"),
        Field("q_strides", "strides(3)", "elements per token, head, channel"),
        Field("k_strides", "strides(3)", "elements per token, head, channel"),
        Field("v_strides", "strides(3)", "elements per token, head, channel"),
        Field("g_strides", "strides(3)", "elements per token, head, channel"),
        Field("beta_strides", "strides(2)", "elements per token, head"),
        Field("do_strides", "strides(3)", "elements per token, head, channel"),
        Field("num_chunks", "i64", "rows of chunk_table"),
        Field("scale", "f32", "factor of q S and of Aqk"),
        Field("lower_bound", "f32", "bound of the bounded gate, in [-5, 0)"),
    )
    + HEAD_BLOCK
    + GATE
    + BETA
    + (Field("use_qk_l2norm", "i32", "1: q and k are divided by their norm"),)
)

ENTRY = cpu_entry(FIELDS)

# Where a thread has 128 registers, at K = 128 and where two CTAs share a processor at K = 64, nvcc 13.0 spills up to
# 224 bytes, stores and loads. On sm_90a it spills of bounded gates no more than 52, and of bf16 at K = 128 nothing
# without grouped heads.
LIMITS = Limits(max_spill_bytes=512)

LARGE_BYTES = 163 * 1024
"""Shared memory that a chunk of K = V = 128 takes; one of 64 fits everywhere."""


def _smxx_records() -> tuple[Record, ...]:
    large = tuple(name for name, arch in ARCHES.items() if arch.shared_memory_bytes >= LARGE_BYTES)
    records = smxx_tile_records("chunk_grad", FIELDS, LIMITS)
    return tuple(replace(r, archs=large) if dict(r.params)["head_dim"] == 128 else r for r in records)


PROGRAM = Program(
    name="chunk_grad",
    summary="dq, dk, dv, dg, dbeta and the chunk's part of dA_log and ddt_bias, one task per (chunk, key head)",
    records=cpu_tile_records("chunk_grad", ENTRY) + _smxx_records(),
    bytes_note="per (token, value head), K = V = 128, 16-bit inputs: 1,024 of q, k, g, do, 1,024 of h and dS, 896 "
    "of v' and z, 1,024 of dq, dk, dv, dg",
)
