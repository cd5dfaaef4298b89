"""Segment summaries and the walk over them: any cut of any pack gives the single pass, forward and transposed."""

import pytest
import torch

from cake_kda_jit.reference import (
    chunk_kda_reference_backward,
    gate,
    l2norm,
    recurrent_kda,
    segment_summary_reference,
    transfer_walk_reference,
)

from .problems import assert_near, autograd_gradients, make_problem

FORM = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
SUMMARY_KEYWORDS = (*FORM, "A_log", "dt_bias")
# Documents [0, 13) [13, 13) [13, 110) [110, 111); cuts fall on and off multiples of 64, some segments are empty.
DOCUMENTS = [0, 13, 13, 110, 111]
CUTS = {
    "whole documents": ([0, 13, 110, 111], [0, 1, 1, 2, 3]),
    "every few tokens": ([0, 5, 10, 13, 14, 50, 77, 109, 110, 111], [0, 3, 3, 8, 9]),
    "empty segments": ([0, 0, 13, 77, 77, 110, 111, 111], [0, 2, 2, 5, 7]),
}


def detached(problem):
    return [x.detach() for x in problem.inputs]


def summary_keywords(problem):
    return {name: problem.keywords[name] for name in SUMMARY_KEYWORDS}


@pytest.mark.parametrize("cut", CUTS)
def test_walking_summaries_is_the_single_pass(cut):
    segments, chains = CUTS[cut]
    problem = make_problem(DOCUMENTS, **FORM)
    q, k, v, g, beta = detached(problem)
    o, final_state = problem.forward()
    M, B = segment_summary_reference(k, v, g, beta, segments, **summary_keywords(problem))
    entry, exit_states = transfer_walk_reference(M, B, problem.keywords["initial_state"], chains)
    assert_near(exit_states, final_state)
    # Each segment run by itself from the state that the walk found gives the outputs of the whole pass.
    keywords = {**problem.keywords, "cu_seqlens": segments, "initial_state": entry}
    assert_near(recurrent_kda(q, k, v, g, beta, **keywords)[0], o)


@pytest.mark.parametrize("cut", CUTS)
def test_walking_transposed_is_the_single_backward(cut):
    segments, chains = CUTS[cut]
    problem = make_problem(DOCUMENTS, **FORM)
    q, k, v, g, beta = detached(problem)
    expected = autograd_gradients(problem)
    M, B = segment_summary_reference(k, v, g, beta, segments, **summary_keywords(problem))
    local = {**problem.keywords, "cu_seqlens": segments, "initial_state": None}
    # D, the state gradient that the segment's own outputs cause, does not depend on its entry state.
    D = chunk_kda_reference_backward(q, k, v, g, beta, do=problem.do, **local).dinitial_state
    dS_out, dinitial_state = transfer_walk_reference(M, D, problem.dfinal_state, chains, transpose=True)
    assert_near(dinitial_state, expected["dinitial_state"])

    local["initial_state"], _ = transfer_walk_reference(M, B, problem.keywords["initial_state"], chains)
    gradients = chunk_kda_reference_backward(q, k, v, g, beta, do=problem.do, dfinal_state=dS_out, **local)
    for name in ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias"):
        assert_near(getattr(gradients, name), expected[name])


def test_M_is_the_product_of_the_chunk_transitions():
    problem = make_problem([0, 100], H=1, HV=1, **FORM)
    _, k, v, g, beta = detached(problem)
    M, B = segment_summary_reference(k, v, g, beta, [0, 100], **summary_keywords(problem))
    keys, strength = l2norm(k)[0, :, 0], beta[0, :, 0].sigmoid()
    log_decay = gate(g, problem.keywords["A_log"], problem.keywords["dt_bias"])[0, :, 0].detach()
    expected = torch.eye(8, dtype=torch.float64)
    for start in (0, 64):
        rows = slice(start, min(start + 64, 100))
        kc, bc, G = keys[rows], strength[rows, None], log_decay[rows].cumsum(0)
        ke, kg = kc * G.exp(), kc * (G[-1] - G).exp()
        Akk = bc * torch.einsum("id,jd,ijd->ij", kc, kc, (G[:, None] - G).clamp(max=0).exp()).tril(-1)
        w = torch.linalg.solve_triangular(Akk, bc * ke, upper=False, unitriangular=True)
        expected = (torch.diag(G[-1].exp()) - kg.T @ w) @ expected
    assert_near(M[0, 0], expected)
    assert_near(B[0], recurrent_kda(k, k, v, g, beta, **{**problem.keywords, "initial_state": None})[1][0])


def test_empty_segments_and_resets():
    problem = make_problem([0, 6], H=1, HV=1)
    _, k, v, g, beta = detached(problem)
    g[0, 5] = -torch.inf
    M, B = segment_summary_reference(k, v, g, beta, torch.tensor([0, 0, 5, 6]))
    assert torch.equal(M[0, 0], torch.eye(8, dtype=torch.float64)) and torch.count_nonzero(B[0]) == 0
    assert torch.count_nonzero(M[2]) == 0 and torch.count_nonzero(M[1]) > 0


def test_walk_returns_fp64_and_the_initial_state_of_an_empty_chain():
    M, B = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 5)
    initial = torch.randn(4, 2, 4, 5)
    offsets = torch.tensor([0, 0, 2, 2, 3], dtype=torch.int32)
    for transpose in (False, True):
        entry, exit_states = transfer_walk_reference(M, B, initial, offsets, transpose)
        assert entry.dtype == exit_states.dtype == torch.float64
        assert torch.equal(exit_states[[0, 2]], initial[[0, 2]].double())
        first, last = (1, 0) if transpose else (0, 1)
        assert torch.equal(entry[[first, 2]], initial[[1, 3]].double())
        step = M[first].double().mT if transpose else M[first].double()
        assert_near(entry[last], step @ initial[1].double() + B[first].double())
        zeros, _ = transfer_walk_reference(M, B, None, offsets, transpose)
        assert torch.count_nonzero(zeros[first]) == 0
    nothing, unchanged = transfer_walk_reference(M[:0], B[:0], initial, [0, 0, 0, 0, 0])
    assert nothing.shape == (0, 2, 4, 5) and torch.equal(unchanged, initial.double())


def test_transposed_walk_is_the_adjoint_of_the_forward_one():
    torch.manual_seed(0)
    M, B, D = (torch.randn(5, 1, 3, n, dtype=torch.float64) for n in (3, 2, 2))
    initial = torch.randn(2, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    B.requires_grad_()
    dexit = torch.randn(2, 1, 3, 2, dtype=torch.float64)
    entry, exit_states = transfer_walk_reference(M, B, initial, [0, 3, 5])
    dB, dinitial = torch.autograd.grad((entry, exit_states), (B, initial), (D, dexit))
    dS_out, dS_start = transfer_walk_reference(M, D, dexit, [0, 3, 5], transpose=True)
    assert_near(dS_out, dB)
    assert_near(dS_start, dinitial)


def test_walk_refuses_offsets_that_do_not_tile():
    M, B = torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 1, 1)
    for offsets in ([], [0, 1], [1, 2], [0, 2, 1, 2], [0, 3]):
        with pytest.raises(ValueError, match="offsets"):
            transfer_walk_reference(M, B, None, offsets)
