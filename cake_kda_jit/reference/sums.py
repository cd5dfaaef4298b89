"""What the gate parameters' gradients, sums over all tokens, would be if their terms had random signs.

dA_log and ddt_bias are sums of `w_i dg_i` with a slope w of the gate. Within a chunk, and with `c_i` the sum of w up to
and including row i, they come from four sets of numbers, which the kernels keep in tiles:

    state S:      sum_v S ((c qg)^T do - (c ke)^T beta z + c_last e^G_last dS)
    gradient dS:  sum_v dS (((c_last - c) kg)^T v' + c_last e^G_last S)
    v' and z:     sum_(i>j) (c_i - c_j) (scale q_i do_i - beta_i k_i z_i) k_j e^(G_i - G_j) v'_j, and z in S's product

An error of random sign, relative to each number, makes of a sum of products that many times the root of the sum of the
squares of the products: the *norm of the terms*. It does not fall where terms cancel, as the sum itself does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .chunk import Chunk, entering_states, given_gradients, make_chunk, solve_values
from .gate import gate_backward
from .inputs import KdaKeywords, KdaProblem, make_problem


class ParameterNorms(NamedTuple):
    """Norms of the terms: of dA_log `[HV]` and of ddt_bias `[HV, K]`."""

    dA_log: Tensor
    ddt_bias: Tensor


def parameter_norms_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    do: Tensor,
    dfinal_state: Tensor | None = None,
    **keywords,
) -> ParameterNorms:
    """Norms of the terms that dA_log and ddt_bias are sums of, over all chunks.

    Inputs and keywords as in `chunk_kda_reference_backward`. Raises ValueError without `use_gate_in_kernel`, where
    neither parameter has a gradient, and without `dt_bias`.
    """
    with torch.no_grad():
        problem = make_problem(q, k, v, g, beta, KdaKeywords(**keywords))
        slopes = _slopes(problem)
        do_rows, dS = given_gradients(problem, do, dfinal_state)
        squares = sum(
            (_document_squares(problem, document, do_rows, dS[document], slopes) for document in range(len(dS))),
            start=torch.zeros_like(slopes[:, 0]),
        )
        A_log, dt_bias = squares
        return ParameterNorms(A_log.sum(-1).sqrt(), dt_bias.sqrt())


def _slopes(problem: KdaProblem) -> Tensor:
    """What dg is multiplied with in the sums dA_log and ddt_bias: `[2, tokens, HV, K]`."""
    keywords, g = problem.keywords, problem.raw.g
    if not keywords.use_gate_in_kernel or keywords.dt_bias is None:
        raise ValueError("the gate's parameters have no gradients; set use_gate_in_kernel and give dt_bias")
    bias, _, _ = gate_backward(g, keywords.A_log, keywords.dt_bias, keywords.lower_bound, torch.ones_like(g))
    if keywords.lower_bound is None:
        return torch.stack((problem.g, bias))
    return torch.stack((bias * (g + keywords.dt_bias.to(g).reshape(g.shape[-2:])), bias))


def _document_squares(problem: KdaProblem, document: int, do_rows: Tensor, dS: Tensor, slopes: Tensor) -> Tensor:
    """The squares of a document's terms, added up over its chunks: `[2, HV, K]` for the two slopes."""
    squares = torch.zeros_like(slopes[:, 0])
    for start, end, S in reversed(entering_states(problem, document)):
        chunk = make_chunk(problem, start, end)
        do, weights = do_rows[start:end].transpose(0, 1), slopes[:, start:end].transpose(1, 2)
        v_new = solve_values(chunk, S)
        z = chunk.solve_transposed(chunk.Aqk.mT @ do + chunk.kg @ dS)
        squares += torch.stack([_chunk_squares(chunk, S, dS, do, v_new, z, weight) for weight in weights])
        dS = chunk.total * dS + chunk.qg.mT @ do - chunk.ke.mT @ (chunk.beta * z)
    return squares


def _chunk_squares(chunk: Chunk, S: Tensor, dS: Tensor, do: Tensor, v_new: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    """The sum of the squares of a chunk's terms `[HV, K]`, weight `[HV, L, K]` being the slope of each dg."""
    until = weight.cumsum(dim=1)
    whole = until[:, -1:]
    carried = whole.mT * chunk.total
    beta_z = chunk.beta * z
    of_S = S * ((until * chunk.qg).mT @ do - (until * chunk.ke).mT @ beta_z + carried * dS)
    of_dS = dS * (((whole - until) * chunk.kg).mT @ v_new + carried * S)
    of_z = (until * chunk.ke).square().mT @ beta_z.square() * S.square()

    # A pair's product over V has terms of random signs too; in a pair of z with v', each has an error of its own.
    between = (until.unsqueeze(2) - until.unsqueeze(1)) * chunk.pair * chunk.k.unsqueeze(1)
    values = v_new.square().mT
    by_query = (between * (chunk.scale * chunk.q).unsqueeze(2)).square()
    by_key = (between * (chunk.beta * chunk.k).unsqueeze(2)).square()
    pairs = torch.einsum("hijk,hij->hk", by_query, do.square() @ values)
    pairs += torch.einsum("hijk,hij->hk", by_key, 2 * z.square() @ values)
    return (of_S.square() + of_dS.square() + of_z).sum(-1) + pairs
