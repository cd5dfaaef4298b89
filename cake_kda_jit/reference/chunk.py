"""KDA in chunks of 64 tokens with a backward written by hand: the algebra the kernels follow, in plain torch.

One head, one chunk of L <= 64 rows counted from its document's first token; `D[i,j] = e^(G_i - G_j)`, `last` = L - 1:

    ke = k e^G        qg = scale q e^G        kg_i = k_i e^(G_last - G_i)        Tinv = (I + Akk)^-1
    Akk[i,j] = beta_i sum_d k_i k_j D[i,j]   i > j          Aqk[i,j] = scale sum_d q_i k_j D[i,j]   i >= j
    x = v - ke S ;  v' = Tinv (beta x) ;  o = qg S + Aqk v' ;  S <- diag(e^G_last) S + kg^T v'

`Tinv` stays a triangular solve. D and both of its edges are products of the decays `e^g` in [0, 1], never exponentials
of differences of the sum G, so that a hard reset (`g = -inf`) gives exact zeros and no NaN.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .gate import beta_backward, gate_backward, l2norm_backward
from .inputs import KdaKeywords, KdaProblem, make_problem

CHUNK = 64


@dataclass(frozen=True, eq=False)
class KdaGradients:
    """Gradients of one KDA call, shaped as its inputs, in the dtype computed in.

    dq, dk before the l2norm, dg and dbeta before gate and sigmoid where those were fused. dinitial_state has the
    caller's layout and is there even without an initial state (then it is the gradient of the zero state); dA_log and
    ddt_bias are None where the parameter took no part.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dinitial_state: Tensor
    dA_log: Tensor | None
    ddt_bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Chunk:
    """One chunk of all heads: q, k, ke, qg, kg, to_start, to_end `[HV, L, K]`, v `[HV, L, V]`, beta `[HV, L, 1]`.

    pair `[HV, L, L, K]` is D (0 above the diagonal), to_start `e^G`, to_end `e^(G_last - G)`, total `[HV, K, 1]`
    `e^G_last`; Akk, Aqk `[HV, L, L]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    pair: Tensor
    to_start: Tensor
    to_end: Tensor
    total: Tensor
    ke: Tensor
    qg: Tensor
    kg: Tensor
    Akk: Tensor
    Aqk: Tensor
    scale: float

    def solve(self, x: Tensor) -> Tensor:
        """`Tinv x`."""
        return torch.linalg.solve_triangular(self.Akk, x, upper=False, unitriangular=True)

    def solve_transposed(self, x: Tensor) -> Tensor:
        """`Tinv^T x`."""
        return torch.linalg.solve_triangular(self.Akk.mT, x, upper=True, unitriangular=True)


@dataclass(frozen=True, eq=False)
class _HeadGradients:
    """Gradients on value heads, input transforms still applied; rows of a pack `[tokens, HV, ..]` or a chunk's
    `[HV, L, ..]`, dbeta without the last dimension.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor


def chunk_kda_reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **keywords) -> tuple[Tensor, Tensor]:
    """Outputs and final states of KDA in chunk form; arguments, results and errors as `recurrent_kda`.

    It builds no autograd graph: its backward is `chunk_kda_reference_backward`.
    """
    with torch.no_grad():
        problem = make_problem(q, k, v, g, beta, KdaKeywords(**keywords))
        o = torch.empty_like(problem.v)
        final_state = problem.initial_state.clone()
        for document in range(len(problem.documents)):
            for start, end in chunk_ranges(problem, document):
                chunk = make_chunk(problem, start, end)
                S = final_state[document]
                v_new = solve_values(chunk, S)
                o[start:end] = (chunk.qg @ S + chunk.Aqk @ v_new).transpose(0, 1)
                final_state[document] = chunk.total * S + chunk.kg.mT @ v_new
        return o.reshape(v.shape), problem.swap_state(final_state)


def chunk_kda_reference_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    do: Tensor,
    dfinal_state: Tensor | None = None,
    **keywords,
) -> KdaGradients:
    """Every gradient of `chunk_kda_reference`, by the chunk formulas and without autograd.

    Inputs and keywords as in the forward; do `[B, T, HV, V]`; dfinal_state in the layout of the final state, None = 0.
    An empty document passes its final state's gradient to its initial state.
    """
    with torch.no_grad():
        problem = make_problem(q, k, v, g, beta, KdaKeywords(**keywords))
        do_rows, dS = given_gradients(problem, do, dfinal_state)
        inputs = (problem.q, problem.k, problem.v, problem.g, problem.beta)
        rows = _HeadGradients(*(torch.empty_like(x) for x in inputs))
        for document in range(len(problem.documents)):
            dS[document] = _document_backward(problem, document, do_rows, dS[document], rows)
        return _input_gradients(problem, rows, dS, q, v)


def given_gradients(problem: KdaProblem, do: Tensor, dfinal_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """What a backward begins with: do as rows of value heads, and dS at the documents' ends, a tensor of its own."""
    dS = torch.zeros_like(problem.initial_state)
    if dfinal_state is not None:
        dS += problem.swap_state(dfinal_state)
    return do.to(problem.v.dtype).reshape(problem.v.shape), dS


def chunk_ranges(problem: KdaProblem, document: int) -> list[tuple[int, int]]:
    """Row ranges of a document's chunks, the last of which may be short; none of an empty document."""
    start, end = problem.documents[document]
    return [(row, min(row + CHUNK, end)) for row in range(start, end, CHUNK)]


def make_chunk(problem: KdaProblem, start: int, end: int) -> Chunk:
    """The chunk of rows `start` to `end`, with everything that needs no state."""
    q, k, v, g = (x[start:end].transpose(0, 1) for x in (problem.q, problem.k, problem.v, problem.g))
    beta = problem.beta[start:end].T.unsqueeze(-1)
    decay = g.exp()
    pair = _pair_decays(decay)
    to_start, to_end = decay.cumprod(dim=1), pair[:, -1]
    reach = pair * k.unsqueeze(1)
    Akk = beta * (reach @ k.unsqueeze(-1)).squeeze(-1).tril(-1)
    Aqk = problem.scale * (reach @ q.unsqueeze(-1)).squeeze(-1)
    return Chunk(
        q=q,
        k=k,
        v=v,
        beta=beta,
        pair=pair,
        to_start=to_start,
        to_end=to_end,
        total=to_start[:, -1].unsqueeze(-1),
        ke=k * to_start,
        qg=problem.scale * q * to_start,
        kg=k * to_end,
        Akk=Akk,
        Aqk=Aqk,
        scale=problem.scale,
    )


def _pair_decays(decay: Tensor) -> Tensor:
    """`D[i,j] = d_(j+1) ... d_i` for i >= j, 0 above: `[HV, L, L, K]` from the decays d `[HV, L, K]`."""
    row = torch.arange(decay.shape[1], device=decay.device)
    below = (row.unsqueeze(-1) > row)[..., None]
    factors = torch.where(below, decay.unsqueeze(2), torch.ones_like(decay[:, :1, None]))
    on_or_below = (row.unsqueeze(-1) >= row)[..., None]
    products = factors.cumprod(dim=1)
    return torch.where(on_or_below, products, torch.zeros_like(products))


def solve_values(chunk: Chunk, S: Tensor) -> Tensor:
    """v' `[HV, L, V]`: the values each token really writes, given the state entering the chunk."""
    return chunk.solve(chunk.beta * (chunk.v - chunk.ke @ S))


def entering_states(problem: KdaProblem, document: int) -> list[tuple[int, int, Tensor]]:
    """Row range `(start, end)` of each chunk of a document, and the state that enters it."""
    entering, S = [], problem.initial_state[document]
    for start, end in chunk_ranges(problem, document):
        entering.append((start, end, S))
        chunk = make_chunk(problem, start, end)
        S = chunk.total * S + chunk.kg.mT @ solve_values(chunk, S)
    return entering


def _document_backward(problem: KdaProblem, document: int, do_rows: Tensor, dS: Tensor, rows: _HeadGradients) -> Tensor:
    """Fill one document's rows of the gradients; from the gradient of its final state to that of its initial state."""
    for start, end, S in reversed(entering_states(problem, document)):
        chunk = make_chunk(problem, start, end)
        here = slice(start, end)
        dS, gradients = _chunk_backward(chunk, S, dS, do_rows[here].transpose(0, 1))
        for field in fields(_HeadGradients):
            getattr(rows, field.name)[here] = getattr(gradients, field.name).transpose(0, 1)
    return dS


def _chunk_backward(chunk: Chunk, S: Tensor, dS: Tensor, do: Tensor) -> tuple[Tensor, _HeadGradients]:
    """One chunk, given the state S that enters it and the gradient dS of the state that leaves it: `(dS_in, rows)`."""
    q, k, beta, pair = chunk.q, chunk.k, chunk.beta, chunk.pair
    v_new = solve_values(chunk, S)
    z = chunk.solve_transposed(chunk.Aqk.mT @ do + chunk.kg @ dS)
    dv = beta * z
    dS_in = chunk.total * dS + chunk.qg.mT @ do - chunk.ke.mT @ dv

    dAqk = chunk.scale * (do @ v_new.mT).tril()
    dAkk = -(z @ v_new.mT).tril(-1)
    dq1 = chunk.scale * (do @ S.mT) * chunk.to_start
    dk1 = (v_new @ dS.mT) * chunk.to_end
    zk = -z @ S.mT
    dk2 = beta * zk * chunk.to_start

    # The pair i == j has decay 1: it adds to dq and dk but never to dg, so it is kept apart.
    dAqk_diagonal = dAqk.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    dAqk_below = dAqk.tril(-1)
    reach = pair * k.unsqueeze(1)
    P_below = (dAqk_below.unsqueeze(-2) @ reach).squeeze(-2)
    R = (dAkk.unsqueeze(-2) @ reach).squeeze(-2)
    weights = dAqk_below.unsqueeze(-1) * q.unsqueeze(2) + dAkk.unsqueeze(-1) * (beta * k).unsqueeze(2)
    Q_below = (weights * pair).sum(dim=1)

    dq = dq1 + P_below + dAqk_diagonal * k
    dk = dk1 + dk2 + beta * R + Q_below + dAqk_diagonal * q
    dbeta = (z * chunk.v).sum(-1) + (zk * k * chunk.to_start).sum(-1) + (R * k).sum(-1)
    dG = q * dq1 + k * dk2 + q * P_below + k * (beta * R - Q_below)
    dg = _gate_gradient(dG, k * dk1, chunk.total.squeeze(-1) * (S * dS).sum(-1))
    return dS_in, _HeadGradients(dq=dq, dk=dk, dv=dv, dg=dg, dbeta=dbeta)


def _gate_gradient(dG: Tensor, leaving: Tensor, carried: Tensor) -> Tensor:
    """dg_i: suffix sum of dG, plus what tokens before i send out of the chunk, plus what the state carries through it.

    dG, leaving `[HV, L, K]`, carried `[HV, K]`. The prefix is exclusive: token i's own write is not decayed by g_i.
    """
    suffix = dG.flip(1).cumsum(dim=1).flip(1)
    before = torch.zeros_like(leaving)
    before[:, 1:] = leaving[:, :-1].cumsum(dim=1)
    return suffix + before + carried.unsqueeze(1)


def _input_gradients(problem: KdaProblem, rows: _HeadGradients, dS: Tensor, q: Tensor, v: Tensor) -> KdaGradients:
    """Undo head grouping and input transforms; shapes of the caller."""
    raw, keywords = problem.raw, problem.keywords
    groups = (q.shape[2], v.shape[2] // q.shape[2])
    dq, dk = (x.unflatten(1, groups).sum(dim=2) for x in (rows.dq, rows.dk))
    if keywords.use_qk_l2norm_in_kernel:
        dq, dk = l2norm_backward(raw.q, dq), l2norm_backward(raw.k, dk)
    dg, dA_log, ddt_bias = rows.dg, None, None
    if keywords.use_gate_in_kernel:
        dg, dA_log, ddt_bias = gate_backward(raw.g, keywords.A_log, keywords.dt_bias, keywords.lower_bound, dg)
    dbeta = beta_backward(
        raw.beta,
        rows.dbeta,
        sigmoid=keywords.use_beta_sigmoid_in_kernel,
        allow_neg_eigval=keywords.allow_neg_eigval,
    )
    return KdaGradients(
        dq=dq.reshape(q.shape),
        dk=dk.reshape(q.shape),
        dv=rows.dv.reshape(v.shape),
        dg=dg.reshape(*v.shape[:3], q.shape[3]),
        dbeta=dbeta.reshape(v.shape[:3]),
        dinitial_state=problem.swap_state(dS),
        dA_log=dA_log,
        ddt_bias=ddt_bias,
    )
