"""``parameter_reduce``: dA_log and ddt_bias from the chunks' partial sums, by a fixed tree."""

from __future__ import annotations

from ..arch import CPU_ARCHES, CUDA_ARCHES
from ..record import Entry, Field, Limits, Program, Record, cpu_entry, make_params

FIELDS = (
    Field("partial_A_log", "ptr", "[chunks, HV] fp32 or null"),
    Field("partial_dt_bias", "ptr", "[chunks, HV, K] fp32 or null"),
    Field("dA_log", "ptr", "[HV] fp32 or null"),
    Field("ddt_bias", "ptr", "[HV, K] fp32 or null"),
    Field("num_chunks", "i64", "chunks"),
    Field("num_value_heads", "i32", "HV"),
    Field("head_dim", "i32", "K"),
)

ENTRY = cpu_entry(FIELDS)

PROGRAM = Program(
    name="parameter_reduce",
    summary="sums over 64 chunks in order, then over these sums in order: the shape depends on the chunks alone",
    records=(
        Record(
            program="parameter_reduce",
            variant="fp32",
            family="cpu",
            params=make_params(),
            archs=CPU_ARCHES,
            template="cpu/parameter_reduce.cpp.jinja",
            entry=ENTRY,
            limits=Limits(max_spill_bytes=None),
        ),
        Record(
            program="parameter_reduce",
            variant="fp32",
            family="smxx",
            params=make_params(),
            archs=CUDA_ARCHES,
            template="smxx/parameter_reduce.cu.jinja",
            entry=Entry(FIELDS),
        ),
    ),
    bytes_note="4 per chunk and value head for dA_log, 4 K for ddt_bias",
)
