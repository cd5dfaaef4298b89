"""Causal depthwise convolution over packed documents, in plain differentiable torch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .inputs import find_documents


def causal_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """`y_t = activation(bias + sum_w weight[:, w] x_(t - W + 1 + w))`, each document for itself.

    x `[B, T, D]`, weight `[D, W]` with W in 2..4 (the last tap meets the current token), bias `[D]`, activation "silu"
    or None, initial_state `[N, D, W-1]` (the tokens before the document, oldest first; absent = 0), cu_seqlens `[N+1]`
    (then B = 1; absent = every batch row is a document). All floating tensors of one dtype, which is computed in.

    Returns `(y [B, T, D], final_state [N, D, W-1])`: the last W - 1 of (initial state, tokens), so a document shorter
    than W - 1 keeps the initial state's tail. Raises ValueError for shapes or an activation that do not fit.
    """
    B, T, D = x.shape
    width = weight.shape[-1]
    if weight.shape != (D, width) or not 2 <= width <= 4 or (bias is not None and bias.shape != (D,)):
        given = f"weight {tuple(weight.shape)}, bias {None if bias is None else tuple(bias.shape)}"
        raise ValueError(f"expected weight [{D}, 2..4] and bias [{D}] or None for x {tuple(x.shape)}; got {given}")
    if activation not in (None, "silu"):
        raise ValueError(f'activation is {activation!r}; expected "silu" or None')
    documents = find_documents(cu_seqlens, B, T)
    state = x.new_zeros(len(documents), D, width - 1) if initial_state is None else initial_state
    if state.shape != (len(documents), D, width - 1):
        raise ValueError(f"initial_state is {tuple(state.shape)}; expected {(len(documents), D, width - 1)}")

    rows = x.reshape(B * T, D)
    outputs, final_states = [rows[:0]], [state[:0]]
    for n, (start, end) in enumerate(documents):
        history = torch.cat([state[n].T, rows[start:end]])
        taps = [weight[:, w] * history[w : w + end - start] for w in range(width)]
        outputs.append(sum(taps))
        final_states.append(history[end - start :].T.unsqueeze(0))
    y = torch.cat(outputs).reshape(x.shape)
    y = y if bias is None else y + bias
    return functional.silu(y) if activation == "silu" else y, torch.cat(final_states)
