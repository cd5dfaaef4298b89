"""The forward of one packed attention call, on checked inputs."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from ..programs.tile_fields import VALUE_ROWS
from .inputs import Inputs
from .pipeline import Pipeline, Tiles, tile_dtype
from .problem import KdaOptions
from .workspace import HeadBlock, head_blocks, tile_bytes_per_head


@dataclass
class Context:
    """What a forward keeps for its backward; None where a mode does not keep it.

    ``saved`` keeps Tinv, Aqk ``[HV, chunks, 64, 64]``, h ``[HV, chunks, V, K]`` and v_new ``[HV, chunks, rows, V]``;
    ``replay`` keeps Tinv and checkpoints ``[rows, HV, V, K]``. Both keep M ``[summary rows, HV, K, K]``, so that a
    backward needs no forward summaries.
    """

    Tinv: torch.Tensor | None = None
    Aqk: torch.Tensor | None = None
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


CONTEXT_NAMES = tuple(field.name for field in fields(Context))


def num_checkpoints(num_chunks: int, num_segments: int, checkpoint_tokens: int) -> int:
    """Return the rows of the checkpoints: one per interval, with one more for each segment's own start."""
    return num_chunks * 64 // checkpoint_tokens + num_segments


def kept_names(backward: str | None, num_summaries: int) -> tuple[str, ...]:
    """Return the names of what a forward keeps, in the order of CONTEXT_NAMES; ``backward`` None keeps nothing."""
    if backward is None:
        return ()
    names = ("Tinv", "Aqk", "h", "v_new") if backward == "saved" else ("Tinv", "checkpoints")
    return (*names, "M") if num_summaries else names


def context_shapes(inputs: Inputs, backward: str | None, checkpoint_tokens: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a forward keeps, in the order of ``kept_names``."""
    heads, head_dim, chunks = inputs.num_value_heads, inputs.head_dim, inputs.chunk_table.shape[0]
    value_rows = VALUE_ROWS[tile_dtype(inputs.device).itemsize]
    shapes = {
        "Tinv": (heads, chunks, 64, 64),
        "Aqk": (heads, chunks, 64, 64),
        "h": (heads, chunks, head_dim, head_dim),
        "v_new": (heads, chunks, value_rows, head_dim),
        "checkpoints": (
            num_checkpoints(chunks, inputs.segment_table.shape[0], checkpoint_tokens),
            heads,
            head_dim,
            head_dim,
        ),
        "M": (inputs.num_summaries, heads, head_dim, head_dim),
    }
    return {name: shapes[name] for name in kept_names(backward, inputs.num_summaries)}


def context_dtype(name: str, shapes: dict[str, tuple[int, ...]], device: torch.device) -> torch.dtype:
    """Return the dtype of a kept tensor: tiles have the tiles' dtype; states, M and what is not kept are fp32."""
    return tile_dtype(device) if name in shapes and name in ("Tinv", "Aqk", "h", "v_new") else torch.float32


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
    num_bytes = tile_bytes_per_head(
        pipeline.num_chunks, inputs.head_dim, pipeline.tile_dtype.itemsize, states=0, values=0
    )
    limits = options.workspace_limit, options.backward
    for block in head_blocks(num_bytes, inputs.num_heads, inputs.num_value_heads, *limits):
        tiles = make_tiles(pipeline, block, context)
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


def make_context(inputs: Inputs, options: KdaOptions, keep: bool) -> Context:
    """Return the tensors that a forward will fill for its backward; none unless ``keep``."""
    device = inputs.v.device
    shapes = context_shapes(inputs, options.backward if keep else None, options.checkpoint_tokens)
    # Some rows are written by nothing: checkpoints are numbered without a table, which leaves gaps between segments,
    # and M of a document's first segment is not needed without an initial state. They are zeros, so that an operator's
    # outputs are the same bytes in every run.
    return Context(
        **{
            name: inputs.executor.empty(
                shape, context_dtype(name, shapes, device), device, is_zero=name in ("checkpoints", "M")
            )
            for name, shape in shapes.items()
        }
    )


def make_tiles(pipeline: Pipeline, block: HeadBlock, context: Context) -> Tiles:
    """Return empty tiles of a block; Aqk and Tinv are the context's own where it keeps them."""
    kept = {name: context.block(name, block) for name in ("Aqk", "Tinv")}
    return pipeline.make_tiles(block, "ke", "qg", "kg", "decay_total", **kept)


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
