"""Segment summaries on checked inputs: what context parallelism passes between ranks."""

from __future__ import annotations

import torch

from .pipeline import Pipeline
from .workspace import head_blocks


def summarize(pipeline: Pipeline, *, need_M: bool, need_B: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Launch the summaries of every segment; returns M ``[F, HV, K, K]`` and B ``[F, HV, K, V]``."""
    inputs = pipeline.inputs
    M = pipeline.summaries() if need_M else None
    B = pipeline.summaries() if need_B else None
    if inputs.num_summaries == 0 or not (need_M or need_B):
        return M, B
    num_bytes = pipeline.scratch_bytes(states=0, values=0)
    for block in head_blocks(num_bytes, inputs.num_heads, inputs.num_value_heads, None):
        tiles = pipeline.make_tiles(block, "ke", "kg", "Tinv", "decay_total")
        if pipeline.num_chunks:
            pipeline.prepare(block, tiles)
        pipeline.summarize(block, tiles, M=M, B=B, skip={"first_M": False, "first_B": False, "last_B": False})
    return M, B
