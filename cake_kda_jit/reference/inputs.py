"""One KDA call, checked and brought to the plain form that the references compute on.

The references take the keyword names of `chunk_kda`; `KdaKeywords` lists them once, `make_problem` applies the input
transforms and repeats grouped heads, so that recurrence and chunk form see the same `[tokens, HV, ...]` tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from .gate import beta as transform_beta
from .gate import gate, l2norm

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class KdaKeywords:
    """Keyword arguments of the KDA references; names and meanings are those of `chunk_kda`.

    initial_state `[N, HV, K, V]` (`[N, HV, V, K]` with `state_v_first`), absent = 0; A_log `[HV]`, dt_bias `[HV*K]` or
    `[HV, K]`; cu_seqlens `[N+1]`, a tensor or integers, absent = every batch row is a document; scale defaults to
    `K ** -0.5`. `safe_gate` changes no result. `dtype` is the type computed in; absent, the widest type of the inputs.
    """

    scale: float | None = None
    initial_state: Tensor | None = None
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    lower_bound: float | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    state_v_first: bool = False
    cu_seqlens: Tensor | Sequence[int] | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True, eq=False)
class RawInputs:
    """q, k `[tokens, H, K]`, v `[tokens, HV, V]`, g `[tokens, HV, K]`, beta `[tokens, HV]` before their transforms."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


@dataclass(frozen=True, eq=False)
class KdaProblem:
    """What the recurrence is defined on: transformed tensors, all on value heads and of one dtype.

    q, k, g `[tokens, HV, K]`, v `[tokens, HV, V]`, beta `[tokens, HV]`, initial_state `[N, HV, K, V]`; `documents` are
    half-open row ranges, some possibly empty.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    scale: float
    documents: Ranges
    raw: RawInputs
    keywords: KdaKeywords

    def swap_state(self, state: Tensor) -> Tensor:
        """A state turned between the caller's layout and `[N, HV, K, V]` (its own inverse)."""
        return state.transpose(-1, -2) if self.keywords.state_v_first else state


def find_documents(cu_seqlens: Tensor | Sequence[int] | None, batch: int, tokens: int) -> Ranges:
    """Row ranges of the documents in `[batch * tokens]` flattened rows.

    Without `cu_seqlens` each batch row is one document. Raises ValueError unless `cu_seqlens` starts at 0, never
    decreases, ends at `tokens`, and `batch` is 1.
    """
    if cu_seqlens is None:
        return tuple((b * tokens, (b + 1) * tokens) for b in range(batch))
    if batch != 1:
        raise ValueError(f"cu_seqlens describes one packed row, but the batch size is {batch}")
    return find_ranges("cu_seqlens", cu_seqlens, tokens)


def find_ranges(name: str, offsets: Tensor | Sequence[int], end: int) -> Ranges:
    """The half-open ranges between neighbouring `offsets`, which must tile 0 to `end`; ValueError calls them `name`."""
    bounds = offsets.tolist() if isinstance(offsets, Tensor) else list(offsets)
    if not bounds or bounds[0] != 0 or bounds[-1] != end or any(a > b for a, b in zip(bounds, bounds[1:])):
        raise ValueError(f"{name} must start at 0, never decrease and end at {end}; got {bounds}")
    return tuple(zip(bounds, bounds[1:]))


def make_problem(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, keywords: KdaKeywords) -> KdaProblem:
    """Check one call's shapes, apply its input transforms, flatten it to rows; differentiable throughout.

    q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g `[B, T, HV, K]`, beta `[B, T, HV]`, HV a multiple of H.
    Raises ValueError naming the shapes that do not fit.
    """
    _check_shapes(q, k, v, g, beta)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    documents = find_documents(keywords.cu_seqlens, B, T)
    dtype = keywords.dtype or _widest_dtype(q, k, v, g, beta, keywords.initial_state, keywords.A_log, keywords.dt_bias)
    raw = RawInputs(*(x.to(dtype).reshape(B * T, *x.shape[2:]) for x in (q, k, v, g, beta)))
    state = _initial_state(keywords, v.new_zeros(len(documents), HV, K, V, dtype=dtype))

    normalised = (l2norm(x) if keywords.use_qk_l2norm_in_kernel else x for x in (raw.q, raw.k))
    q_heads, k_heads = (x.repeat_interleave(HV // H, dim=1) for x in normalised)
    log_decay = raw.g
    if keywords.use_gate_in_kernel:
        log_decay = gate(raw.g, keywords.A_log, keywords.dt_bias, keywords.lower_bound)
    strength = transform_beta(
        raw.beta, sigmoid=keywords.use_beta_sigmoid_in_kernel, allow_neg_eigval=keywords.allow_neg_eigval
    )
    return KdaProblem(
        q=q_heads,
        k=k_heads,
        v=raw.v,
        g=log_decay,
        beta=strength,
        initial_state=state,
        scale=K**-0.5 if keywords.scale is None else keywords.scale,
        documents=documents,
        raw=raw,
        keywords=keywords,
    )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    given = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, g {tuple(g.shape)}, beta {tuple(beta.shape)}"
    if q.dim() != 4 or v.dim() != 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        raise ValueError(f"expected q, k [B, T, H, K] and v [B, T, HV, V]; got {given}")
    if g.shape != (*v.shape[:3], q.shape[3]) or beta.shape != v.shape[:3]:
        raise ValueError(f"expected g [B, T, HV, K] and beta [B, T, HV]; got {given}")
    if q.shape[2] < 1 or v.shape[2] % q.shape[2]:
        raise ValueError(f"HV must be a multiple of H; got {given}")


def _initial_state(keywords: KdaKeywords, zeros: Tensor) -> Tensor:
    if keywords.initial_state is None:
        return zeros
    state = keywords.initial_state.to(zeros.dtype)
    state = state.transpose(-1, -2) if keywords.state_v_first else state
    if state.shape != zeros.shape:
        raise ValueError(f"initial_state is {tuple(state.shape)} as [N, HV, K, V]; expected {tuple(zeros.shape)}")
    return state


def _widest_dtype(*tensors: Tensor | None) -> torch.dtype:
    return reduce(torch.promote_types, (x.dtype for x in tensors if x is not None))
