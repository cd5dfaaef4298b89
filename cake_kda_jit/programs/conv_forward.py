"""``conv_forward``: causal depthwise convolution of width 2 to 4 over packed documents, with SiLU.

Its halo form is ``initial_state`` in fp32: the tokens before a fragment, held by whoever. Their gradient comes back in
fp32 and is added at the owner, as ``dfinal_state``, before rounding.
"""

from __future__ import annotations

from ..arch import CPU_ARCHES, CUDA_ARCHES
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

# The cpu family reads boundaries on the host and cuts channels only; a GPU's grid is cut in tokens too.
CUDA_SIZES = (Field("num_tokens", "i64", "T, rows of x"),)
CUDA_OPTIONS = (Field("tile_tokens", "i32", "tokens of a CTA; see tile_tokens()"),)

POINTERS = INPUT_POINTERS + (
    Field("y", "ptr", "[T, D] contiguous, dtype of x"),
    Field("final_state", "ptr", "[N, D, W - 1] contiguous or null"),
)
STRIDES = (Field("x_strides", "strides(2)", "elements per token, channel"),)

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
