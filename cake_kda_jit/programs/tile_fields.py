"""The argument fields that the programs of the chunk pipeline share: tables, chunk tiles, head blocks.

``chunk_prepare`` forms the tiles of every chunk, ``chunk_scan`` and ``grad_scan`` carry states through the chunks of a
segment, ``chunk_grad`` turns what they left into gradients. Tiles are blocked by head, ``[HB, chunks, ...]``, HB value
heads from ``first_head`` on, whole groups; rows past a short chunk's last token are 0. A record's
``tile_dtype`` is the dtype of tile elements: fp32 in the cpu family, bf16 on a GPU. Public tensors are indexed by the
absolute head.

v' and z are larger than other tiles where these are bf16: they are held in two parts, so that no more than 2^-16 of a
number is lost. Behind its 64 rounded rows a tile of v' has 64 rows of what the rounding took; a tile of z has 64 rows
of bytes, in the place of 32: by how much the bits of fp32 z, as an integer, are above those of the rounded z, in units
of 0x100 and from -0x8000 on.
"""

from __future__ import annotations

from ..record import Field

VALUE_ROWS = {4: 64, 2: 128}
"""Rows of a tile of v', ``[HB, chunks, rows, V]``, by the bytes of an element."""

GRADIENT_ROWS = {4: 64, 2: 96}
"""Rows of a tile of z, ``[HB, chunks, rows, V]``, by the bytes of an element."""

TABLES = (
    Field("chunk_table", "ptr", "[chunks, 4] int32: document (-1: none), first token, tokens, segment"),
    Field("segment_table", "ptr", "[segments, 4] int32: document (-1: none), first chunk, chunks, summary row or -1"),
)

PREPARED_TILES = (
    Field("ke", "ptr", "[HB, chunks, 64, K] tile: k e^G"),
    Field("qg", "ptr", "[HB, chunks, 64, K] tile: scale q e^G"),
    Field("kg", "ptr", "[HB, chunks, 64, K] tile: k e^(G_last - G)"),
    Field("Aqk", "ptr", "[HB, chunks, 64, 64] tile, lower triangle"),
    Field("Tinv", "ptr", "[HB, chunks, 64, 64] tile: (I + Akk)^-1"),
    Field("decay_total", "ptr", "[HB, chunks, K] fp32: e^G_last"),
)

READY = Field(
    "ready", "ptr", "[2 + HB x chunks] uint32 or null, cleared by chunk_prepare: two counts, then 1 for each tile"
)
"""With it a scan, launched right behind ``chunk_prepare``, begins beside it and takes tiles as they come."""

TILE_NAMES = tuple(field.name for field in PREPARED_TILES)

HEAD_BLOCK = (
    Field("num_heads", "i32", "H"),
    Field("num_value_heads", "i32", "HV, a multiple of H"),
    Field("first_head", "i32", "first value head of the block"),
    Field("num_block_heads", "i32", "HB: value heads of the block, whole groups"),
)

BETA = (
    Field("beta_dtype", "i32", "0 bf16, 1 fp16, 2 fp32"),
    Field("beta_form", "i32", "0 ready, 1 sigmoid, 2 twice sigmoid"),
)

GATE = (
    Field("g_dtype", "i32", "0 bf16, 1 fp16, 2 fp32"),
    Field("gate_form", "i32", "0 ready, 1 softplus, 2 bounded"),
)
