"""``gated_norm_forward``: x over its root mean square per head, times a weight and the sigmoid of a gate.

Nothing is kept for a backward: a row's root mean square costs it a sum over what it reads anyway.
"""

from __future__ import annotations

from ..arch import CPU_ARCHES, CUDA_ARCHES
from ..record import Entry, Field, Limits, Program, Record, cpu_entry, make_params
from .common import DTYPES, HEAD_DIMS, variant_name

INPUT_POINTERS = (
    Field("x", "ptr", "[T, HV, D]"),
    Field("gate", "ptr", "[T, HV, D] logits"),
    Field("weight", "ptr", "[D] contiguous"),
)
INPUT_STRIDES = (
    Field("x_strides", "strides(3)", "elements per token, head, channel"),
    Field("gate_strides", "strides(3)", "elements per token, head, channel"),
)
SIZES = (Field("num_tokens", "i64", "T"),)
OPTIONS = (
    Field("num_value_heads", "i32", "HV"),
    Field("weight_dtype", "i32", "0 bf16, 1 fp16, 2 fp32"),
    Field("eps", "f32", "added to the mean of squares"),
)

FIELDS = INPUT_POINTERS + (Field("y", "ptr", "[T, HV, D] contiguous, dtype of x"),) + INPUT_STRIDES + SIZES + OPTIONS


def norm_records(program: str, fields: tuple[Field, ...]) -> tuple[Record, ...]:
    """Return the records of a norm's program: one per family, dtype of x and D."""
    return tuple(
        _norm_record(program, fields, family, dtype, head_dim)
        for family in ("cpu", "smxx")
        for dtype in DTYPES
        for head_dim in HEAD_DIMS
    )


def _norm_record(program: str, fields: tuple[Field, ...], family: str, dtype: str, head_dim: int) -> Record:
    is_cpu = family == "cpu"
    return Record(
        program=program,
        variant=variant_name(dtype, head_dim),
        family=family,
        params=make_params(dtype=dtype, head_dim=head_dim),
        archs=CPU_ARCHES if is_cpu else CUDA_ARCHES,
        template=f"cpu/{program}.cpp.jinja" if is_cpu else f"smxx/{program}.cu.jinja",
        entry=cpu_entry(fields) if is_cpu else Entry(fields),
        limits=Limits(max_spill_bytes=None if is_cpu else 0),
    )


PROGRAM = Program(
    name="gated_norm_forward",
    summary="RMS norm over the channels of each head, times weight and sigmoid(gate)",
    records=norm_records("gated_norm_forward", FIELDS),
    bytes_note="per (token, value head), D = 128, 16 bits: 768 of x, gate and y",
)
