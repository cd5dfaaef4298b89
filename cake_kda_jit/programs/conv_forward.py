"""``conv_forward``: causal depthwise convolution of width 2 to 4 over packed documents, with SiLU (cpu family)."""

from __future__ import annotations

from ..arch import CPU_ARCHES
from ..record import Entry, Field, Limits, Program, Record, cpu_entry, make_params
from .common import DTYPES

INPUT_POINTERS = (
    Field("x", "ptr", "[T, D]"),
    Field("weight", "ptr", "[D, W] contiguous"),
    Field("bias", "ptr", "[D] or null, dtype of weight"),
    Field("initial_state", "ptr", "[N, D, W - 1] contiguous, or null for zeros: the tokens before each document"),
    Field("cu_seqlens", "ptr", "[N + 1] int64: first token of each document"),
)

SIZES = (
    Field("num_channels", "i64", "D"),
    Field("num_documents", "i64", "N"),
)

OPTIONS = (
    Field("width", "i32", "W, 2 to 4"),
    Field("use_silu", "i32", "1: y = silu(convolution), 0: y = convolution"),
    Field("weight_dtype", "i32", "0 bf16, 1 fp16, 2 fp32"),
    Field("state_dtype", "i32", "of initial_state and final_state: 0 bf16, 1 fp16, 2 fp32"),
)

ENTRY = cpu_entry(
    INPUT_POINTERS
    + (
        Field("y", "ptr", "[T, D] contiguous, dtype of x"),
        Field("final_state", "ptr", "[N, D, W - 1] contiguous or null"),
    )
    + (Field("x_strides", "strides(2)", "elements per token, channel"),)
    + SIZES
    + OPTIONS
)


def cpu_conv_record(program: str, entry: Entry, dtype: str) -> Record:
    """Return the cpu record of a convolution program for one dtype of x."""
    return Record(
        program=program,
        variant=dtype,
        family="cpu",
        params=make_params(dtype=dtype),
        archs=CPU_ARCHES,
        template=f"cpu/{program}.cpp.jinja",
        entry=entry,
        limits=Limits(max_spill_bytes=None),
    )


PROGRAM = Program(
    name="conv_forward",
    summary="causal depthwise convolution and SiLU; documents never mix",
    records=tuple(cpu_conv_record("conv_forward", ENTRY, dtype) for dtype in DTYPES),
)
