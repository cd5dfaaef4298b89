"""The forward of one packed attention call, on checked inputs."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from ..programs.tile_fields import TILE_NAMES, VALUE_ROWS
from .inputs import Inputs
from .pipeline import Pipeline, Tiles, tile_dtype
from .problem import KdaOptions
from .workspace import HeadBlock, head_blocks


@dataclass
class Context:
    """What a forward keeps for its backward; None where a mode does not keep it.

    ``saved`` keeps Tinv, Aqk ``[HV, chunks, 64, 64]``, h ``[HV, chunks, V, K]`` and v_new ``[HV, chunks, rows, V]``;
    with ``keep_decayed_qk`` also ke, qg, kg ``[HV, chunks, 64, K]`` and decay_total ``[HV, chunks, K]``. ``replay``
    keeps Tinv and checkpoints ``[rows, HV, V, K]``. Both keep M ``[summary rows, HV, K, K]``, so that a backward needs
    no forward summaries.
    """

    Tinv: torch.Tensor | None = None
    Aqk: torch.Tensor | None = None
    ke: torch.Tensor | None = None
    qg: torch.Tensor | None = None
    kg: torch.Tensor | None = None
    decay_total: torch.Tensor | None = None
    h: torch.Tensor | None = None
    v_new: torch.Tensor | None = None
    checkpoints: torch.Tensor | None = None
    M: torch.Tensor | None = None

    def block(self, name: str, block: HeadBlock) -> torch.Tensor | None:
        """Return a kept tile tensor's heads of a block, or None."""
        tensor = getattr(self, name)
        if tensor is None or tensor.shape[0] == block.count:
            return tensor
        return tensor[block.first : block.first + block.count]

    def tiles(self, block: HeadBlock) -> dict[str, torch.Tensor | None]:
        """Return a block's heads of the prepared tiles, None for one that is not kept."""
        return {name: self.block(name, block) for name in TILE_NAMES}


CONTEXT_NAMES = tuple(field.name for field in fields(Context))


def num_checkpoints(num_chunks: int, num_segments: int, checkpoint_tokens: int) -> int:
    """Return the rows of the checkpoints: one per interval, with one more for each segment's own start."""
    return num_chunks * 64 // checkpoint_tokens + num_segments


def kept_names(options: KdaOptions | None, num_summaries: int) -> tuple[str, ...]:
    """Return the names of what a forward keeps, in the order of CONTEXT_NAMES; ``options`` None keeps nothing."""
    if options is None:
        return ()
    if options.backward == "replay":
        names = ("Tinv", "checkpoints")
    else:
        decayed = ("ke", "qg", "kg", "decay_total") if options.keep_decayed_qk else ()
        names = ("Tinv", "Aqk", *decayed, "h", "v_new")
    return (*names, "M") if num_summaries else names


def kept_tiles(options: KdaOptions | None) -> tuple[str, ...]:
    """Return the names of the prepared tiles that a forward keeps, which are no scratch then."""
    return tuple(name for name in kept_names(options, 0) if name in TILE_NAMES)


def context_shapes(inputs: Inputs, options: KdaOptions | None) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a forward keeps, in the order of ``kept_names``; None keeps nothing."""
    if options is None:
        return {}
    heads, head_dim, chunks = inputs.num_value_heads, inputs.head_dim, inputs.chunk_table.shape[0]
    value_rows = VALUE_ROWS[tile_dtype(inputs.device).itemsize]
    rows, square = (heads, chunks, 64, head_dim), (heads, chunks, 64, 64)
    shapes = {
        "Tinv": square,
        "Aqk": square,
        "ke": rows,
        "qg": rows,
        "kg": rows,
        "decay_total": (heads, chunks, head_dim),
        "h": (heads, chunks, head_dim, head_dim),
        "v_new": (heads, chunks, value_rows, head_dim),
        "M": (inputs.num_summaries, heads, head_dim, head_dim),
    }
    if options.backward == "replay":
        num_rows = num_checkpoints(chunks, inputs.segment_table.shape[0], options.checkpoint_tokens)
        shapes["checkpoints"] = (num_rows, heads, head_dim, head_dim)
    return {name: shapes[name] for name in kept_names(options, inputs.num_summaries)}


def context_dtype(name: str, shapes: dict[str, tuple[int, ...]], device: torch.device) -> torch.dtype:
    """Return the dtype of a kept tensor: tiles have the tiles' dtype; totals, states, M, what is not kept are fp32."""
    is_fp32 = name not in shapes or name in ("decay_total", "checkpoints", "M")
    return torch.float32 if is_fp32 else tile_dtype(device)


def chunk_forward(
    pipeline: Pipeline, options: KdaOptions, *, output_final_state: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, Context]:
    """Launch the forward; returns o ``[T, HV, V]``, the final state if wanted, and what the backward needs if kept."""
    inputs = pipeline.inputs
    o = inputs.empty_rows(inputs.v)
    final_state = inputs.empty(inputs.state_shape()) if output_final_state else None
    context = make_context(inputs, options, keep)
    if pipeline.num_chunks == 0:
        if final_state is not None:
            final_state.zero_() if inputs.initial_state is None else final_state.copy_(inputs.initial_state)
        return o, final_state, context
    summaries = _Summaries(pipeline, context.M) if inputs.num_summaries else None
    num_bytes = pipeline.scratch_bytes(states=0, values=0, kept=kept_tiles(options if keep else None))
    limits = options.workspace_limit, options.backward
    for block in head_blocks(num_bytes, inputs.num_heads, inputs.num_value_heads, *limits):
        tiles = pipeline.make_tiles(block, **context.tiles(block))
        if summaries is None:
            pipeline.overlap(block, tiles, "chunk_scan" if context.h is None else "chunk_scan, kept")
        pipeline.prepare(block, tiles)
        segment_entry = summaries.entries(block, tiles) if summaries else None
        outputs = {
            "o": o,
            "final_state": final_state,
            "h": context.block("h", block),
            "v_new": context.block("v_new", block),
            "checkpoints": context.checkpoints,
        }
        pipeline.scan(block, tiles, segment_entry, outputs, options.checkpoint_tokens)
    return o, final_state, context


UNWRITTEN = ("checkpoints", "M")
"""What a forward keeps and may write a part of.

Checkpoints are numbered without a table, which leaves gaps between segments, and M of a document's first segment is not
needed without an initial state. Such rows are zeros, so that an operator's outputs are the same bytes in every run.
"""


def make_context(inputs: Inputs, options: KdaOptions, keep: bool, unwritten: tuple[str, ...] = UNWRITTEN) -> Context:
    """Return the tensors that a forward will fill for its backward; none unless ``keep``. ``unwritten`` are zeros."""
    device = inputs.v.device
    shapes = context_shapes(inputs, options if keep else None)
    return Context(
        **{
            name: inputs.executor.empty(shape, context_dtype(name, shapes, device), device, is_zero=name in unwritten)
            for name, shape in shapes.items()
        }
    )


class _Summaries:
    """The states entering every segment: summaries of a head block, then the walk over each document's segments."""

    def __init__(self, pipeline: Pipeline, M: torch.Tensor | None) -> None:
        self.pipeline = pipeline
        self.M = pipeline.summaries() if M is None else M
        self.B = pipeline.summaries()

    def entries(self, block: HeadBlock, tiles: Tiles) -> torch.Tensor:
        """Return the state entering every segment with a summary row, ``[rows, HV, K, V]``, for a block's heads."""
        initial_state = self.pipeline.inputs.initial_state
        # The walk starts from no state without an initial one, so it reads no M of a first segment; nor does it read
        # the last segment's B, since nothing asks what leaves it. The last M serves the backward.
        skip = {"first_M": initial_state is None, "first_B": False, "last_B": True}
        self.pipeline.summarize(block, tiles, M=self.M, B=self.B, skip=skip)
        return self.pipeline.walk(block, self.M, self.B, initial_state, transpose=False)
