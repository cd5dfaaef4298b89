"""Affine summaries of token ranges and the walk that chains them, in plain torch.

Over any run of tokens of one document the state is affine, `S_out = M S_in + B`. Chained in sequence order,
`S_in[f+1] = M_f S_in[f] + B_f`; the gradient runs backwards over the same M, `dS_in = M^T dS_out + D`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .inputs import find_ranges
from .recurrence import recurrent_kda


def segment_summary_reference(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    offsets: Tensor | Sequence[int],
    **keywords,
) -> tuple[Tensor, Tensor]:
    """M and B of every segment, by the recurrence.

    k `[1, T, H, K]`, v `[1, T, HV, V]`, g `[1, T, HV, K]`, beta `[1, T, HV]`; offsets `[F+1]` are the segments' token
    boundaries, 0 to T; `keywords` are the gate, norm and beta arguments of `recurrent_kda` and `dtype`.

    Returns `(M [F, HV, K, K], B [F, HV, K, V])`: M is the product of `(I - beta k k^T) diag(e^g)` over the tokens,
    later ones on the left, so `M[i, j]` maps input row j to output row i; B is the final state from 0. An empty
    segment has the identity and 0. Differentiable. Raises as `recurrent_kda`.
    """
    HV, K = g.shape[2:]
    segments = len(offsets) - 1
    # The columns of a state do not mix: K more of them, started from the identity with values 0, carry M beside B.
    values = torch.cat([v.new_zeros(*v.shape[:3], K), v], dim=-1)
    identity = torch.eye(K, dtype=v.dtype, device=v.device).expand(segments, HV, K, K)
    start = torch.cat([identity, v.new_zeros(segments, HV, K, v.shape[3])], dim=-1)
    _, state = recurrent_kda(k, k, values, g, beta, initial_state=start, cu_seqlens=offsets, **keywords)
    return state[..., :K], state[..., K:]


def transfer_walk_reference(
    M: Tensor,
    B: Tensor,
    initial: Tensor | None,
    offsets: Tensor | Sequence[int],
    transpose: bool = False,
) -> tuple[Tensor, Tensor]:
    """Walk every chain of fragments, `S <- M_f S + B_f`, in FP64.

    M `[F, HV, K, K]`, B `[F, HV, K, V]`, initial `[N, HV, K, V]` (None = 0), offsets `[N+1]`: chain n owns fragments
    `offsets[n]` to `offsets[n+1]`, in sequence order.

    Forward: `initial` enters each chain's first fragment; `entry[f]` is the state that enters fragment f, `exit[n]` the
    one that leaves the chain. With `transpose`, `S <- M_f^T S + B_f` from the last fragment to the first, B being D:
    `initial` is the gradient at the chain's end, `entry[f]` the gradient of the state leaving fragment f, `exit[n]` the
    gradient at the chain's start. An empty chain returns its initial state.
    Returns `(entry [F, HV, K, V], exit [N, HV, K, V])`, FP64. Raises ValueError for offsets that do not tile F.
    """
    chains = find_ranges("offsets", offsets, len(M))
    M, B = M.double(), B.double()
    states = B.new_zeros(len(chains), *B.shape[1:]) if initial is None else initial.double()
    entries, exits = [B[:0]], [B[:0]]
    for n, (first, end) in enumerate(chains):
        S, entered = states[n], []
        for f in reversed(range(first, end)) if transpose else range(first, end):
            entered.append(S.unsqueeze(0))
            S = (M[f].mT if transpose else M[f]) @ S + B[f]
        entries += reversed(entered) if transpose else entered
        exits.append(S.unsqueeze(0))
    return torch.cat(entries), torch.cat(exits)
