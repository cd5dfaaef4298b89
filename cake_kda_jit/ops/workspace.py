"""How much scratch a head block needs, and how heads are cut into blocks. Blocks change memory, never bits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..errors import UnsupportedProblemError
from ..programs.tile_fields import GRADIENT_ROWS, VALUE_ROWS
from .problem import CHUNK_TOKENS

DEFAULT_LIMITS = {"saved": 6_400_000_000, "replay": 3_200_000_000}
"""Bytes of scratch where no ``workspace_limit`` is given: ``saved`` is chosen for time, ``replay`` for memory."""


@dataclass(frozen=True)
class HeadBlock:
    """Value heads ``[first, first + count)``: whole groups, so that a key head's gradient is summed in one place."""

    first: int
    count: int


def tile_bytes(num_chunks: int, head_dim: int, element_bytes: int) -> dict[str, int]:
    """Return the bytes of each prepared tile per value head.

    They are multiples of 256, so that every tile of one allocation is aligned.
    """
    row, square = CHUNK_TOKENS * head_dim * element_bytes, CHUNK_TOKENS * CHUNK_TOKENS * element_bytes
    each = {"ke": row, "qg": row, "kg": row, "Aqk": square, "Tinv": square, "decay_total": head_dim * 4}
    return {name: num_chunks * size for name, size in each.items()}


def tile_bytes_per_head(
    num_chunks: int, head_dim: int, element_bytes: int, *, states: int, values: int, kept: Collection[str] = ()
) -> int:
    """Return scratch bytes of one value head.

    Counted: the prepared tiles but for those that are ``kept`` for a backward, ``states`` tensors ``[chunks, V, K]``
    and ``values`` tensors of a chunk's tokens: none, z, or z and v'.
    """
    prepared = tile_bytes(num_chunks, head_dim, element_bytes)
    value_rows = (0, GRADIENT_ROWS[element_bytes], GRADIENT_ROWS[element_bytes] + VALUE_ROWS[element_bytes])[values]
    others = num_chunks * (value_rows + states * head_dim) * head_dim * element_bytes
    return sum(size for name, size in prepared.items() if name not in kept) + others


def head_blocks(
    bytes_per_head: int, num_heads: int, num_value_heads: int, limit: int | None, backward: str = "saved"
) -> list[HeadBlock]:
    """Return the fewest blocks of equal whole groups that fit the limit; raises if one group does not.

    Without a limit that of ``backward`` holds, and a single group may exceed it.
    """
    group = num_value_heads // num_heads
    groups = (limit or DEFAULT_LIMITS[backward]) // max(bytes_per_head * group, 1)
    if groups < 1:
        if limit is not None:
            raise UnsupportedProblemError(
                f"workspace_limit={limit} bytes is too small: {group} value heads of one key head need "
                f"{bytes_per_head * group} bytes; raise the limit or split the pack"
            )
        groups = 1
    num_blocks = -(-num_heads // min(groups, num_heads))
    size = -(-num_heads // num_blocks) * group
    return [HeadBlock(first, min(size, num_value_heads - first)) for first in range(0, num_value_heads, size)]
