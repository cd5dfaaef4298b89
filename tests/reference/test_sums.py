"""The terms of dA_log and ddt_bias: written out product by product they are the sums, and their squares the norms."""

import itertools

import pytest
import torch

from cake_kda_jit.reference import chunk_kda_reference_backward, gate_backward, parameter_norms_reference
from cake_kda_jit.reference.chunk import make_chunk, solve_values
from cake_kda_jit.reference.inputs import KdaKeywords
from cake_kda_jit.reference.inputs import make_problem as prepare

from .problems import make_problem

GATE = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
FORMS = {"softplus": GATE, "bounded": {**GATE, "lower_bound": -5.0}}


def norms(problem):
    return parameter_norms_reference(
        *problem.inputs, do=problem.do, dfinal_state=problem.dfinal_state, **problem.keywords
    )


def products(problem, head, channel):
    """Every product of one chunk that a channel's ddt_bias is a sum of, and how many of its factors tiles hold."""
    raw = problem.keywords
    prepared = prepare(*problem.inputs, KdaKeywords(**raw))
    g = prepared.raw.g
    slopes, _, _ = gate_backward(g, raw["A_log"], raw["dt_bias"], raw.get("lower_bound"), torch.ones_like(g))
    [(start, end)] = prepared.documents
    chunk = make_chunk(prepared, start, end)
    S, dS = prepared.initial_state[0], prepared.swap_state(problem.dfinal_state)[0]
    do = problem.do.reshape(prepared.v.shape).transpose(0, 1)
    v_new = solve_values(chunk, S)
    z = chunk.solve_transposed(chunk.Aqk.mT @ do + chunk.kg @ dS)
    c, h, k = slopes[:, head, channel].cumsum(0), head, channel
    for v in range(S.shape[-1]):
        of_S = sum(c[i] * chunk.qg[h, i, k] * do[h, i, v] for i in range(end))
        of_S -= sum(c[i] * chunk.ke[h, i, k] * chunk.beta[h, i, 0] * z[h, i, v] for i in range(end))
        of_dS = sum((c[-1] - c[i]) * chunk.kg[h, i, k] * v_new[h, i, v] for i in range(end))
        carried = c[-1] * chunk.total[h, k, 0] * S[h, k, v] * dS[h, k, v]
        yield "S", S[h, k, v] * of_S + carried
        yield "dS", dS[h, k, v] * of_dS + carried
        yield "twice", -carried
        for i in range(end):
            yield "z", c[i] * chunk.ke[h, i, k] * chunk.beta[h, i, 0] * z[h, i, v] * S[h, k, v]
        for i, j in itertools.combinations(range(end), 2):
            pair = (c[j] - c[i]) * chunk.pair[h, j, i, k] * chunk.k[h, i, k] * v_new[h, i, v]
            yield "v", pair * chunk.scale * chunk.q[h, j, k] * do[h, j, v]
            yield "v and z", -pair * chunk.beta[h, j, 0] * chunk.k[h, j, k] * z[h, j, v]


@pytest.mark.parametrize("form", FORMS)
def test_products_of_a_chunk_add_up_to_the_sum_and_their_squares_to_the_norm(form):
    problem = make_problem([0, 5], H=1, HV=2, K=3, **FORMS[form])
    gradients = chunk_kda_reference_backward(
        *problem.inputs, do=problem.do, dfinal_state=problem.dfinal_state, **problem.keywords
    )
    found = norms(problem).ddt_bias
    assert found.shape == (2, 3)
    for head, channel in itertools.product(range(2), range(3)):
        terms = list(products(problem, head, channel))
        expected = gradients.ddt_bias.view(2, 3)[head, channel]
        torch.testing.assert_close(sum(x for name, x in terms if name != "z"), expected)
        errors = {"S": 1, "dS": 1, "z": 1, "v": 1, "v and z": 2, "twice": 0}
        squares = sum(errors[name] * x.square() for name, x in terms)
        torch.testing.assert_close(found[head, channel], squares.sqrt())


@pytest.mark.parametrize("form", FORMS)
def test_errors_of_states_make_that_share_of_the_norm(form):
    """States off by 1e-6 of each number, at random: so is dA_log, by as much of its norm, give or take its luck."""
    problem = make_problem([0, 30], H=1, HV=4, K=16, **FORMS[form])
    arguments = {"do": problem.do, "dfinal_state": problem.dfinal_state, **problem.keywords}
    exact = chunk_kda_reference_backward(*problem.inputs, **arguments)
    noise = torch.Generator().manual_seed(1)
    for name in ("initial_state", "dfinal_state"):
        state = arguments[name]
        arguments[name] = state * (1 + 1e-6 * torch.randn(state.shape, generator=noise, dtype=state.dtype))
    found = chunk_kda_reference_backward(*problem.inputs, **arguments)
    share = (found.ddt_bias - exact.ddt_bias).norm() / norms(problem).ddt_bias.norm()
    assert 0.5e-6 < share < 2e-6


def test_chunks_and_documents_add_their_squares():
    """What is behind a hard reset, or in another document, has errors of its own."""
    problem = make_problem([0, 40, 110], H=1, HV=2, **FORMS["softplus"])
    whole = norms(problem)
    q, k, v, g, beta = problem.inputs
    squares = []
    for document, rows in enumerate((slice(0, 40), slice(40, 110))):
        keywords = {**problem.keywords, "cu_seqlens": [0, rows.stop - rows.start]}
        keywords["initial_state"] = problem.keywords["initial_state"][document : document + 1]
        dfinal_state = problem.dfinal_state[document : document + 1]
        inputs = (x[:, rows] for x in (q, k, v, g, beta))
        part = parameter_norms_reference(*inputs, do=problem.do[:, rows], dfinal_state=dfinal_state, **keywords)
        squares.append([x.square() for x in part])
    for total, one, other in zip(whole, *squares):
        torch.testing.assert_close(total.square(), one + other)


def test_a_gate_without_parameters_is_refused():
    problem = make_problem([0, 5])
    with pytest.raises(ValueError, match="set use_gate_in_kernel and give dt_bias"):
        norms(problem)
