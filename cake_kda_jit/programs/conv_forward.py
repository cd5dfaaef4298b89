"""``conv_forward``: causal depthwise convolutions of width 2 to 4 over packed documents, with SiLU.

A launch takes up to three, those of q, k and v, which share their documents, their width and all dtypes. Each has its
own channels and is cut as in a launch of its own, so its bits are the same.

Its halo form is ``initial_state`` in fp32: the tokens before a fragment, held by whoever. Their gradient comes back in
fp32 and is added at the owner, as ``dfinal_state``, before rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..arch import CPU_ARCHES, CUDA_ARCHES
from ..record import Entry, Field, Limits, Program, Record, cpu_entry, make_params
from .common import DTYPES

MOST_PARTS = 3
"""Convolutions of a launch, its parts. What each has of its own is an array of the argument block."""

PTR_EACH, I64_EACH, I32_EACH = (f"{kind}({MOST_PARTS})" for kind in ("ptr", "i64", "i32"))
STRIDES_EACH = f"strides({2 * MOST_PARTS})"

INPUT_POINTERS = (
    Field("x", PTR_EACH, "[T, D]"),
    Field("weight", PTR_EACH, "[D, W] contiguous"),
    Field("bias", PTR_EACH, "[D] or null, dtype of weight"),
    Field("initial_state", PTR_EACH, "[N, D, W - 1] contiguous, or null for zeros: the tokens before each document"),
    Field("cu_seqlens", "ptr", "[N + 1] int64: first token of each document"),
)

SIZES = (
    Field("num_channels", I64_EACH, "D, 0 for a part that is not there"),
    Field("num_documents", "i64", "N"),
)

OPTIONS = (
    Field("width", "i32", "W, 2 to 4"),
    Field("use_silu", "i32", "1: y = silu(convolution), 0: y = convolution"),
    Field("weight_dtype", "i32", "0 bf16, 1 fp16, 2 fp32"),
    Field("state_dtype", "i32", "of initial_state and final_state: 0 bf16, 1 fp16, 2 fp32"),
)

# The cpu family reads boundaries on the host and cuts channels only; a GPU's grid is cut in tokens too.
CUDA_SIZES = (Field("num_tokens", "i64", "T, rows of x"),)
CUDA_OPTIONS = (Field("tile_tokens", I32_EACH, "tokens of a CTA; see tile_tokens()"),)

POINTERS = INPUT_POINTERS + (
    Field("y", PTR_EACH, "[T, D] contiguous, dtype of x"),
    Field("final_state", PTR_EACH, "[N, D, W - 1] contiguous or null"),
)
STRIDES = (Field("x_strides", STRIDES_EACH, "elements per token, channel of each part"),)

CUDA_DTYPES = ("bf16", "fp16")
BLOCK_CHANNELS = 1024
"""Channels of the forward's CTA; the backward's, with more registers a thread, has half of them."""
_ENOUGH_CTAS = 256


def tile_tokens(num_tokens: int, num_channels: int) -> int:
    """Return the tokens that a CTA walks: as many as leave enough CTAs to fill a GPU, between 16 and 512.

    Sums over tokens are cut at tiles, so the rule depends on sizes alone and not on the device. Each tile reads its
    neighbour's last rows and its taps again and, backward, writes sums: fewer and longer tiles are faster.
    """
    tokens, blocks = 512, -(-num_channels // BLOCK_CHANNELS)
    while tokens > 16 and -(-num_tokens // tokens) * blocks < _ENOUGH_CTAS:
        tokens //= 2
    return tokens


def join_parts(entry: Entry, parts: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the argument values of one launch out of those that each part has alone; None is a null pointer.

    What all parts share is taken from the first.
    """
    values = dict(parts[0])
    for field in entry.fields:
        if field.is_array:
            given = [part[field.name] for part in parts]
            found = [number for one in given for number in (one if isinstance(one, tuple) else (one or 0,))]
            values[field.name] = (*found, *(0,) * (field.count - len(found)))
    return values


def conv_records(program: str, cpu: Entry, cuda: Entry) -> tuple[Record, ...]:
    """Return the records of a convolution program: one per family and dtype of x, for all widths."""
    return tuple(_conv_record(program, cpu, "cpu", dtype) for dtype in DTYPES) + tuple(
        _conv_record(program, cuda, "smxx", dtype) for dtype in CUDA_DTYPES
    )


def _conv_record(program: str, entry: Entry, family: str, dtype: str) -> Record:
    is_cpu = family == "cpu"
    return Record(
        program=program,
        variant=dtype,
        family=family,
        params=make_params(dtype=dtype),
        archs=CPU_ARCHES if is_cpu else CUDA_ARCHES,
        template=f"cpu/{program}.cpp.jinja" if is_cpu else f"smxx/{program}.cu.jinja",
        entry=entry,
        limits=Limits(max_spill_bytes=None if is_cpu else 0),
    )


PROGRAM = Program(
    name="conv_forward",
    summary="causal depthwise convolution and SiLU; documents never mix",
    records=conv_records(
        "conv_forward",
        cpu_entry(POINTERS + STRIDES + SIZES + OPTIONS),
        Entry(POINTERS + STRIDES + SIZES + CUDA_SIZES + OPTIONS + CUDA_OPTIONS),
    ),
    bytes_note="per token and channel of 16 bits: x 2, y 2",
)
