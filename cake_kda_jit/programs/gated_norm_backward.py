"""``gated_norm_backward``: gradients of the gated norm."""

from __future__ import annotations

from ..record import Field, Program
from .gated_norm_forward import INPUT_POINTERS, INPUT_STRIDES, OPTIONS, SIZES, norm_records

FIELDS = (
    INPUT_POINTERS
    + (
        Field("dy", "ptr", "[T, HV, D] gradient of y, dtype of x"),
        Field("dx", "ptr", "[T, HV, D] contiguous, dtype of x"),
        Field("dgate", "ptr", "[T, HV, D] contiguous, dtype of x"),
        Field("dweight", "ptr", "[D], dtype of weight"),
        Field("workspace", "ptr", "[tiles, D] fp32: each tile's part of dweight"),
    )
    + INPUT_STRIDES
    + (Field("dy_strides", "strides(3)", "elements per token, head, channel"),)
    + SIZES
    + (Field("workspace_bytes", "i64", "at least workspace_bytes()"),)
    + OPTIONS
    + (Field("tile_rows", "i32", "rows, (token, head) in order, whose dweight is one part; see tile_rows()"),)
)

_MOST_TILE_ROWS = 256
_LEAST_TILE_ROWS = 64
_ENOUGH_TILES = 512


def tile_rows(num_rows: int) -> int:
    """Return the rows of a tile: as many as leave enough tiles to fill a GPU, between 64 and 256.

    The sum for dweight is cut at tiles, so the rule depends on sizes alone and not on the device.
    """
    rows = _MOST_TILE_ROWS
    while rows > _LEAST_TILE_ROWS and -(-num_rows // rows) < _ENOUGH_TILES:
        rows //= 2
    return rows


def workspace_bytes(num_rows: int, head_dim: int) -> int:
    """Return the size of the workspace: an fp32 number per tile and channel."""
    return max(1, -(-num_rows // tile_rows(num_rows))) * head_dim * 4


PROGRAM = Program(
    name="gated_norm_backward",
    summary="gradients of x, gate and weight of the gated norm; the sum over rows in a fixed order",
    records=norm_records("gated_norm_backward", FIELDS),
    bytes_note="per (token, value head), D = 128, 16 bits: 1,280 of x, gate, dy, dx and dgate; workspace 8 D per tile",
)
