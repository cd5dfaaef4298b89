"""The forward of one packed attention call, on checked inputs."""

from __future__ import annotations

import torch

from ..runtime.launch import launch
from .select import select_attention
from .values import Inputs, Transforms, address, attention_values


def chunk_forward(
    inputs: Inputs,
    transforms: Transforms,
    *,
    num_chunks: int,
    output_final_state: bool,
    keep_states: bool,
    family: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Launch the forward; returns o ``[T, HV, V]``, and the final state and the chunk states where they are wanted.

    ``chunk_states`` is fp32 ``[chunks, HV, K, V]``: the state entering every chunk, which the backward reads.
    """
    state_shape = inputs.state_shape()
    o = inputs.v.new_empty(inputs.v.shape)
    final_state = inputs.v.new_empty(state_shape, dtype=torch.float32) if output_final_state else None
    chunk_states = inputs.v.new_empty((num_chunks, *state_shape[1:]), dtype=torch.float32) if keep_states else None
    if num_chunks == 0:
        if final_state is not None:
            _copy_or_zero(final_state, inputs.initial_state)
        return o, final_state, chunk_states
    chosen = select_attention("chunk_forward", inputs.problem(), family)
    values = attention_values(inputs, transforms)
    values |= {"o": o.data_ptr(), "final_state": address(final_state), "chunk_states": address(chunk_states)}
    launch(chosen.record, chosen.reason, values, o.device)
    return o, final_state, chunk_states


def _copy_or_zero(target: torch.Tensor, source: torch.Tensor | None) -> None:
    if source is None:
        target.zero_()
    else:
        target.copy_(source)
