"""``conv_backward``: gradients of up to three causal depthwise convolutions."""

from __future__ import annotations

from ..record import Entry, Field, Program, cpu_entry
from .conv_forward import (
    CUDA_OPTIONS,
    CUDA_SIZES,
    I64_EACH,
    INPUT_POINTERS,
    OPTIONS,
    PTR_EACH,
    SIZES,
    STRIDES_EACH,
    conv_records,
    tile_tokens,
)

POINTERS = INPUT_POINTERS + (
    Field("dy", PTR_EACH, "[T, D] gradient of y, dtype of x"),
    Field("dfinal_state", PTR_EACH, "[N, D, W - 1] contiguous or null, dtype of the states"),
    Field("dx", PTR_EACH, "[T, D] contiguous, dtype of x"),
    Field("dweight", PTR_EACH, "[D, W] contiguous, dtype of weight"),
    Field("dbias", PTR_EACH, "[D] or null, dtype of weight"),
    Field("dinitial_state", PTR_EACH, "[N, D, W - 1] contiguous or null, dtype of the states"),
)
STRIDES = (
    Field("x_strides", STRIDES_EACH, "elements per token, channel of each part"),
    Field("dy_strides", STRIDES_EACH, "elements per token, channel of each part"),
)
WORKSPACE_POINTERS = (Field("workspace", PTR_EACH, "[tiles, W + 1, D] fp32: each tile's part of dweight and dbias"),)
WORKSPACE_SIZES = (Field("workspace_bytes", I64_EACH, "at least workspace_bytes()"),)


def workspace_bytes(num_tokens: int, num_channels: int, width: int) -> int:
    """Return the size of the CUDA families' workspace: an fp32 number per tile, channel, and tap or bias."""
    num_tiles = max(1, -(-num_tokens // tile_tokens(num_tokens, num_channels)))
    return num_tiles * (width + 1) * num_channels * 4


PROGRAM = Program(
    name="conv_backward",
    summary="gradients of x, weight, bias and initial_state of the convolution; sums in a fixed order",
    records=conv_records(
        "conv_backward",
        cpu_entry(POINTERS + STRIDES + SIZES + OPTIONS),
        Entry(POINTERS + WORKSPACE_POINTERS + STRIDES + SIZES + CUDA_SIZES + WORKSPACE_SIZES + OPTIONS + CUDA_OPTIONS),
    ),
    bytes_note="per token and channel of 16 bits: x 2, dy 2, dx 2; workspace 8 (W + 1) per tile and channel",
)
