"""``conv_backward``: gradients of the causal depthwise convolution (cpu family)."""

from __future__ import annotations

from ..record import Field, Program, cpu_entry
from .common import DTYPES
from .conv_forward import INPUT_POINTERS, OPTIONS, SIZES, cpu_conv_record

ENTRY = cpu_entry(
    INPUT_POINTERS
    + (
        Field("dy", "ptr", "[T, D] gradient of y, dtype of x"),
        Field("dfinal_state", "ptr", "[N, D, W - 1] contiguous or null, dtype of the states"),
        Field("dx", "ptr", "[T, D] contiguous, dtype of x"),
        Field("dweight", "ptr", "[D, W] contiguous, dtype of weight"),
        Field("dbias", "ptr", "[D] or null, dtype of weight"),
        Field("dinitial_state", "ptr", "[N, D, W - 1] contiguous or null, dtype of the states"),
    )
    + (
        Field("x_strides", "strides(2)", "elements per token, channel"),
        Field("dy_strides", "strides(2)", "elements per token, channel"),
    )
    + SIZES
    + OPTIONS
)

PROGRAM = Program(
    name="conv_backward",
    summary="gradients of x, weight, bias and initial_state of the convolution; sums in token order",
    records=tuple(cpu_conv_record("conv_backward", ENTRY, dtype) for dtype in DTYPES),
)
