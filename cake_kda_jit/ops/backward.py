"""The backward of one packed attention call, from what its forward kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..programs.tile_fields import TILE_NAMES
from .forward import Context, kept_tiles
from .inputs import Inputs
from .pipeline import Pipeline, Tiles
from .problem import KdaOptions
from .workspace import HeadBlock, head_blocks


@dataclass(frozen=True)
class Gradients:
    """Gradients in the dtype of their inputs; None where the input is absent."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dg: torch.Tensor
    dbeta: torch.Tensor
    dA_log: torch.Tensor | None
    ddt_bias: torch.Tensor | None
    dinitial_state: torch.Tensor | None


def empty_gradients(inputs: Inputs) -> Gradients:
    """Return the gradients that a backward will fill, contiguous."""
    rows = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    others = (inputs.A_log, inputs.dt_bias, inputs.initial_state)
    return Gradients(*map(inputs.empty_rows, rows), *map(inputs.empty_like, others))


def empty_partials(pipeline: Pipeline) -> dict[str, torch.Tensor | None]:
    """Return the chunks' parts of the gate parameters' gradients, to be filled; None where there is no parameter."""
    inputs = pipeline.inputs
    shape = (pipeline.num_chunks, inputs.num_value_heads)

    def empty(like: torch.Tensor | None, *more: int) -> torch.Tensor | None:
        return None if like is None else inputs.empty((*shape, *more))

    return {"partial_A_log": empty(inputs.A_log), "partial_dt_bias": empty(inputs.dt_bias, inputs.head_dim)}


def chunk_backward(
    pipeline: Pipeline, options: KdaOptions, context: Context, do: torch.Tensor, dfinal_state: torch.Tensor | None
) -> Gradients:
    """Launch the backward; do ``[T, HV, V]`` of any strides, dfinal_state ``[N, HV, K, V]`` contiguous."""
    inputs = pipeline.inputs
    gradients = empty_gradients(inputs)
    if pipeline.num_chunks == 0:
        _empty_pack(gradients, dfinal_state)
        return gradients
    partials = empty_partials(pipeline)
    replays = context.checkpoints is not None
    num_bytes = pipeline.scratch_bytes(states=1 + replays, values=1 + replays, kept=kept_tiles(options))
    limits = options.workspace_limit, options.backward
    for block in head_blocks(num_bytes, inputs.num_heads, inputs.num_value_heads, *limits):
        _block_gradients(pipeline, options, context, block, do, dfinal_state, gradients, partials)
    if inputs.A_log is not None or inputs.dt_bias is not None:
        pipeline.reduce_parameters(**partials, dA_log=gradients.dA_log, ddt_bias=gradients.ddt_bias)
    return gradients


def _block_gradients(
    pipeline: Pipeline,
    options: KdaOptions,
    context: Context,
    block: HeadBlock,
    do: torch.Tensor,
    dfinal_state: torch.Tensor | None,
    gradients: Gradients,
    partials: dict[str, torch.Tensor | None],
) -> None:
    """Launch the backward of one head block; its scratch is free again when this returns, before the next block's."""
    replays = context.checkpoints is not None
    overlaps = not replays and not pipeline.inputs.num_summaries
    tiles = prepare_again(pipeline, block, context, overlaps=overlaps)
    segment_dexit = None
    if pipeline.inputs.num_summaries:
        D = pipeline.summaries()
        skip = {"first_M": True, "first_B": True, "last_B": False}
        pipeline.summarize(block, tiles, M=None, B=D, do=do, skip=skip)
        segment_dexit = pipeline.walk(block, context.M, D, dfinal_state, transpose=True)
    kept = {
        "h": pipeline.states(block) if replays else context.block("h", block),
        "v_new": pipeline.values(block) if replays else context.block("v_new", block),
    }
    scanned = {"dS": pipeline.states(block), "z": pipeline.gradients(block)}
    edges = {
        "checkpoints": context.checkpoints,
        "dfinal_state": dfinal_state,
        "segment_dexit": segment_dexit,
        "dinitial_state": gradients.dinitial_state,
    }
    pipeline.grad_scan(block, tiles, do, kept | scanned | edges, options.checkpoint_tokens)
    found = {name: getattr(gradients, name) for name in ("dq", "dk", "dv", "dg", "dbeta")}
    pipeline.grad(block, do, kept | scanned | found | partials)


def prepare_again(pipeline: Pipeline, block: HeadBlock, context: Context, *, overlaps: bool = False) -> Tiles:
    """Form the tiles of a block again, but for those that the forward kept; returns both.

    ``overlaps``: a ``grad_scan`` without a replay is launched right behind, and may begin beside this.
    """
    kept = {name: tile for name, tile in context.tiles(block).items() if tile is not None}
    missing = [name for name in TILE_NAMES if name not in kept]
    if not missing:
        return Tiles(**kept)
    tiles = pipeline.make_tiles(block, *missing)
    if overlaps:
        pipeline.overlap(block, tiles, "grad_scan")
    pipeline.prepare(block, tiles)
    return replace(tiles, **kept)


def _empty_pack(gradients: Gradients, dfinal_state: torch.Tensor | None) -> None:
    for tensor in (gradients.dA_log, gradients.ddt_bias, gradients.dinitial_state):
        if tensor is not None:
            tensor.zero_()
    if gradients.dinitial_state is not None and dfinal_state is not None:
        gradients.dinitial_state.copy_(dfinal_state)
