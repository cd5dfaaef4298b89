"""The backward of one packed attention call, from what its forward kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .forward import Context
from .inputs import Inputs
from .pipeline import Pipeline, Tiles
from .problem import KdaOptions
from .workspace import HeadBlock, head_blocks, tile_bytes_per_head


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


def _empty_like(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _empty_gradients(inputs: Inputs) -> Gradients:
    tensors = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.A_log, inputs.dt_bias, inputs.initial_state)
    return Gradients(*(_empty_like(tensor) for tensor in tensors))


def chunk_backward(
    pipeline: Pipeline, options: KdaOptions, context: Context, do: torch.Tensor, dfinal_state: torch.Tensor | None
) -> Gradients:
    """Launch the backward; do ``[T, HV, V]`` of any strides, dfinal_state ``[N, HV, K, V]`` contiguous."""
    inputs = pipeline.inputs
    gradients = _empty_gradients(inputs)
    if pipeline.num_chunks == 0:
        _empty_pack(gradients, dfinal_state)
        return gradients
    partial_shape = (pipeline.num_chunks, inputs.num_value_heads)
    partials = {
        "partial_A_log": None
        if inputs.A_log is None
        else torch.empty(partial_shape, dtype=torch.float32, device=do.device),
        "partial_dt_bias": None
        if inputs.dt_bias is None
        else torch.empty((*partial_shape, inputs.head_dim), dtype=torch.float32, device=do.device),
    }
    D = pipeline.summaries() if inputs.num_summaries else None
    replays = context.checkpoints is not None
    num_bytes = tile_bytes_per_head(
        pipeline.num_chunks, inputs.head_dim, pipeline.tile_dtype.itemsize, states=1 + replays, values=1 + replays
    )
    for block in head_blocks(num_bytes, inputs.num_heads, inputs.num_value_heads, options.workspace_limit):
        tiles = _prepare(pipeline, block, context)
        segment_dexit = None
        if D is not None:
            skip = {"first_M": True, "first_B": True, "last_B": False}
            pipeline.summarize(block, tiles, M=None, B=D, do=do, skip=skip)
            segment_dexit = pipeline.walk(block, context.M, D, dfinal_state, transpose=True)
        kept = {
            "h": pipeline.states(block) if replays else context.block("h", block),
            "v_new": pipeline.rows(block) if replays else context.block("v_new", block),
        }
        scanned = {"dS": pipeline.states(block), "z": pipeline.rows(block)}
        edges = {
            "checkpoints": context.checkpoints,
            "dfinal_state": dfinal_state,
            "segment_dexit": segment_dexit,
            "dinitial_state": gradients.dinitial_state,
        }
        pipeline.grad_scan(block, tiles, do, kept | scanned | edges, options.checkpoint_tokens)
        found = {name: getattr(gradients, name) for name in ("dq", "dk", "dv", "dg", "dbeta")}
        pipeline.grad(block, do, kept | scanned | found | partials)
    if inputs.A_log is not None or inputs.dt_bias is not None:
        pipeline.reduce_parameters(**partials, dA_log=gradients.dA_log, ddt_bias=gradients.ddt_bias)
    return gradients


def _prepare(pipeline: Pipeline, block: HeadBlock, context: Context) -> Tiles:
    """Form the tiles of a block again, but for those that the forward kept."""
    Aqk = context.block("Aqk", block)
    fresh = Tiles(
        ke=pipeline.rows(block),
        qg=pipeline.rows(block),
        kg=pipeline.rows(block),
        Aqk=pipeline.squares(block) if Aqk is None else None,
        decay_total=pipeline.totals(block),
    )
    pipeline.prepare(block, fresh)
    return Tiles(
        fresh.ke,
        fresh.qg,
        fresh.kg,
        Aqk if fresh.Aqk is None else fresh.Aqk,
        context.block("Tinv", block),
        fresh.decay_total,
    )


def _empty_pack(gradients: Gradients, dfinal_state: torch.Tensor | None) -> None:
    for tensor in (gradients.dA_log, gradients.ddt_bias, gradients.dinitial_state):
        if tensor is not None:
            tensor.zero_()
    if gradients.dinitial_state is not None and dfinal_state is not None:
        gradients.dinitial_state.copy_(dfinal_state)
