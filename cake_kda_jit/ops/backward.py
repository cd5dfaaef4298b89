"""The backward of one packed attention call: from the kept chunk states, or from states computed again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..programs.chunk_backward import workspace_bytes
from ..runtime.launch import launch
from .forward import chunk_forward
from .select import select_attention
from .values import Inputs, Transforms, address, attention_values


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


def _empty_gradients(inputs: Inputs) -> Gradients:
    def like(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    return Gradients(
        *(
            like(t)
            for t in (
                inputs.q,
                inputs.k,
                inputs.v,
                inputs.g,
                inputs.beta,
                inputs.A_log,
                inputs.dt_bias,
                inputs.initial_state,
            )
        )
    )


def chunk_backward(
    inputs: Inputs,
    transforms: Transforms,
    *,
    do: torch.Tensor,
    dfinal_state: torch.Tensor | None,
    chunk_states: torch.Tensor | None,
    num_chunks: int,
    family: str | None,
) -> Gradients:
    """Launch the backward; ``chunk_states`` None replays the forward for them, with the same bits."""
    gradients = _empty_gradients(inputs)
    if num_chunks == 0:
        _empty_pack(gradients, dfinal_state)
        return gradients
    if chunk_states is None:
        _, _, chunk_states = chunk_forward(
            inputs, transforms, num_chunks=num_chunks, output_final_state=False, keep_states=True, family=family
        )
    chosen = select_attention("chunk_backward", inputs.problem(), family)
    documents, value_heads, head_dim, _ = inputs.state_shape()
    needs_workspace = gradients.dA_log is not None or gradients.ddt_bias is not None
    num_bytes = workspace_bytes(documents, value_heads, head_dim) if needs_workspace else 0
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=do.device)
    values = attention_values(inputs, transforms)
    values |= {
        "chunk_states": chunk_states.data_ptr(),
        "do_": do.data_ptr(),
        "do_strides": do.stride(),
        "dfinal_state": address(dfinal_state),
        "dq": gradients.dq.data_ptr(),
        "dk": gradients.dk.data_ptr(),
        "dv": gradients.dv.data_ptr(),
        "dg": gradients.dg.data_ptr(),
        "dbeta": gradients.dbeta.data_ptr(),
        "dA_log": address(gradients.dA_log),
        "ddt_bias": address(gradients.ddt_bias),
        "dinitial_state": address(gradients.dinitial_state),
        "workspace": workspace.data_ptr() if needs_workspace else None,
        "workspace_bytes": num_bytes,
    }
    launch(chosen.record, chosen.reason, values, do.device)
    return gradients


def _empty_pack(gradients: Gradients, dfinal_state: torch.Tensor | None) -> None:
    for tensor in (gradients.dA_log, gradients.ddt_bias, gradients.dinitial_state):
        if tensor is not None:
            tensor.zero_()
    if gradients.dinitial_state is not None and dfinal_state is not None:
        gradients.dinitial_state.copy_(dfinal_state)
