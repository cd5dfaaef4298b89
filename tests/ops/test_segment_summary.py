"""segment_summary and transfer_walk: any cut of the tokens, summarized and walked, is the single pass."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit import UnsupportedProblemError, chunk_kda, segment_summary, transfer_walk
from cake_kda_jit.bench.problems import make_problem, relative_error
from cake_kda_jit.reference import segment_summary_reference

OFFSETS = (0, 64, 64, 65, 200, 333)


@pytest.fixture
def problem():
    return make_problem((333,), heads=1, value_heads=2, dtype=torch.float32, regime="softplus")


def summary_arguments(problem):
    keywords = {name: value for name, value in problem.keywords.items() if name != "initial_state"}
    return [problem.inputs[name] for name in ("k", "v", "g", "beta")], keywords


def test_against_fp64(problem, nan_poison):
    """fp32 sums over 64-token chunks: 1e-7 each; M is asked to 2e-6 after 64 chunks."""
    tensors, keywords = summary_arguments(problem)
    M, B = segment_summary(*tensors, torch.tensor(OFFSETS), **keywords)
    double = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in keywords.items()}
    M_exact, B_exact = segment_summary_reference(*(t.double() for t in tensors), torch.tensor(OFFSETS), **double)
    assert relative_error(M, M_exact) < 2e-6 and relative_error(B, B_exact) < 2e-6
    assert torch.equal(M[1], torch.eye(64).expand(2, 64, 64)) and not B[1].any()  # the empty fragment


def test_walking_the_summaries_is_the_single_pass(problem, nan_poison):
    tensors, keywords = summary_arguments(problem)
    M, B = segment_summary(*tensors, torch.tensor(OFFSETS), **keywords)
    state = problem.keywords["initial_state"]
    entry, exit_ = transfer_walk(M, B, state, torch.tensor([0, len(OFFSETS) - 1]))
    _, final_state = chunk_kda(*problem.inputs.values(), output_final_state=True, **problem.keywords)
    assert relative_error(exit_, final_state.double()) < 2e-6
    assert torch.equal(entry[0], state[0]) and torch.equal(entry[2], entry[1])


def test_only_what_is_needed(problem, nan_poison):
    tensors, keywords = summary_arguments(problem)
    M, B = segment_summary(*tensors, torch.tensor(OFFSETS), **keywords)
    only_M, nothing = segment_summary(*tensors, torch.tensor(OFFSETS), need_B=False, **keywords)
    assert nothing is None and torch.equal(only_M, M)
    nothing, only_B = segment_summary(*tensors, torch.tensor(OFFSETS), need_M=False, **keywords)
    assert nothing is None and torch.equal(only_B, B)


def test_bad_inputs_are_refused(problem):
    tensors, keywords = summary_arguments(problem)
    with pytest.raises(UnsupportedProblemError, match="ends at 300 but the inputs hold 333"):
        segment_summary(*tensors, torch.tensor([0, 300]), **keywords)
    with pytest.raises(UnsupportedProblemError, match="B = 2"):
        segment_summary(*(torch.cat([t, t]) for t in tensors), torch.tensor(OFFSETS), **keywords)
