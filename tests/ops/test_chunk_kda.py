"""chunk_kda against the FP64 recurrence: outputs and every gradient, per document and per head."""

from __future__ import annotations

import pytest
import torch

import cake_kda_jit
from cake_kda_jit import KdaOptions, UnsupportedProblemError, chunk_kda, last_launches, make_plan
from cake_kda_jit.bench import problems
from cake_kda_jit.bench.precision import parameter_errors
from cake_kda_jit.bench.problems import BUDGETS, LOCAL_FACTOR, REGIMES, make_problem, run

LENGTHS = (65, 0, 1, 200, 63, 64, 3)


def check_against_reference(found, expected, problem, regime):
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), name
        if name in ("dA_log", "ddt_bias"):
            continue
        budget = BUDGETS[regime]["final_state" if name == "dinitial_state" else name]
        assert problems.relative_error(tensor, expected[name]) <= budget, name
        for document, head, error in problems.local_errors(name, tensor, expected[name], problem):
            assert error <= LOCAL_FACTOR * budget, (name, document, head)


def check_parameters(found, expected, problem):
    assert max(parameter_errors(found, expected, problem)) <= problems.PARAMETER_BUDGET


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("regime", REGIMES)
def test_packed_documents_against_fp64(regime, head_dim, nan_poison):
    problem = make_problem(LENGTHS, regime=regime, head_dim=head_dim)
    found = run(chunk_kda, problem, output_final_state=True)
    expected = problems.reference(problem)
    check_against_reference(found, expected, problem, regime)
    check_parameters(found, expected, problem)


def test_batch_and_grouped_value_heads(nan_poison):
    problem = make_problem(None, batch=(2, 100), heads=2, value_heads=4)
    found = run(chunk_kda, problem, output_final_state=True)
    check_against_reference(found, problems.reference(problem), problem, "bounded")


def test_ready_inputs_and_fp32_gates(nan_poison):
    """Ready gate and beta in fp32, no norm: o depends on unnormalised keys, so they are scaled to unit length."""
    problem = make_problem((70, 30), with_state=False)
    inputs = problem.inputs
    inputs["k"] = torch.nn.functional.normalize(inputs["k"].float(), dim=-1).to(torch.bfloat16)
    inputs["g"] = -torch.rand(inputs["g"].shape, generator=torch.Generator().manual_seed(3))
    inputs["beta"] = torch.sigmoid(inputs["beta"].float())
    problem.keywords = {}
    found = run(chunk_kda, problem, output_final_state=True)
    assert found["dg"].dtype == found["dbeta"].dtype == torch.float32
    check_against_reference(found, problems.reference(problem), problem, "softplus")


def test_twice_sigmoid_scale_and_state_v_first(nan_poison):
    problem = make_problem((65, 20))
    problem.keywords |= {"allow_neg_eigval": True, "scale": 0.3, "state_v_first": True}
    found = run(chunk_kda, problem, output_final_state=True)
    check_against_reference(found, problems.reference(problem), problem, "bounded")


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.float16, 1e-3)])
def test_other_dtypes(dtype, tolerance, nan_poison):
    """fp32 sees only its own arithmetic (64 products of decays, 1e-7 each); fp16 adds one output rounding of 2^-11."""
    problem = make_problem((65, 1, 30), dtype=dtype)
    found, expected = run(chunk_kda, problem, output_final_state=True), problems.reference(problem)
    for name, tensor in found.items():
        assert problems.relative_error(tensor, expected[name]) <= tolerance, name


def test_replay_gives_the_same_bits_as_saved(nan_poison):
    problem = make_problem(LENGTHS)
    saved = run(chunk_kda, problem, output_final_state=True, options=KdaOptions(backward="saved"))
    replayed = run(chunk_kda, problem, output_final_state=True, options=KdaOptions(backward="replay"))
    for name in saved:
        assert torch.equal(saved[name], replayed[name]), name


def test_a_document_does_not_see_its_neighbours(nan_poison):
    """The second document alone gives the same bits as inside the pack; other gradients are exactly 0."""
    problem = make_problem((40, 70, 9), with_state=False)
    o, _ = chunk_kda(*problem.inputs.values(), cu_seqlens=problem.cu_seqlens, **problem.keywords)
    alone, _ = chunk_kda(*(t[:, 40:110] for t in problem.inputs.values()), **problem.keywords)
    assert torch.equal(o[:, 40:110], alone)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in problem.inputs.items()}
    o, _ = chunk_kda(*leaves.values(), cu_seqlens=problem.cu_seqlens, **problem.keywords)
    o[:, 40:110].float().square().sum().backward()
    for name, leaf in leaves.items():
        assert not leaf.grad[:, :40].any() and not leaf.grad[:, 110:].any(), name


def test_bits_do_not_depend_on_threads_or_runs(nan_poison):
    problem = make_problem(LENGTHS)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 3):
            torch.set_num_threads(threads)
            results.append(run(chunk_kda, problem, output_final_state=True))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name, tensor in results[0].items():
            assert torch.equal(tensor, other[name]), name


def test_one_token_documents_without_state_have_no_gate_gradient():
    problem = make_problem((1,) * 64, with_state=False)
    assert not run(chunk_kda, problem, output_final_state=True)["dg"].any()


def test_hard_reset_inside_a_chunk():
    problem = make_problem((100,), with_state=True)
    problem.inputs["g"] = -torch.rand(problem.inputs["g"].shape)
    problem.inputs["g"][:, 30] = -torch.inf
    problem.inputs["beta"] = torch.sigmoid(problem.inputs["beta"].float())
    problem.keywords = {"use_qk_l2norm_in_kernel": True, "initial_state": problem.keywords["initial_state"]}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in problem.leaves().items()}
    o, final_state = chunk_kda(
        *(leaves[n] for n in problems.NAMES),
        **{**problem.keywords, "initial_state": leaves["initial_state"]},
        output_final_state=True,
    )
    o[:, 30:].float().sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves.values())
    assert not leaves["v"].grad[:, :30].any(), "nothing before a reset reaches what follows it"
    assert not leaves["initial_state"].grad.any()


def test_empty_documents_pass_their_state_and_its_gradient():
    problem = make_problem((0, 64, 0, 36, 0))
    state = problem.keywords["initial_state"]
    found = run(chunk_kda, problem, output_final_state=True)
    generator = torch.Generator().manual_seed(99)
    torch.randn(found["o"].shape, generator=generator)
    dfinal_state = torch.randn(found["final_state"].shape, generator=generator)
    for document in (0, 2, 4):
        assert torch.equal(found["final_state"][document], state[document])
        assert torch.equal(found["dinitial_state"][document], dfinal_state[document])


@pytest.mark.parametrize("boundaries", [[0, 0], [0, 0, 0]])
def test_a_pack_without_tokens(boundaries):
    problem = make_problem((0,) * (len(boundaries) - 1))
    found = run(chunk_kda, problem, output_final_state=True)
    assert torch.equal(found["final_state"], problem.keywords["initial_state"])
    assert found["o"].shape[1] == 0 and not found["dA_log"].any()


def test_a_plan_is_reused_and_survives_a_changed_cu_seqlens():
    problem = make_problem((40, 25))
    boundaries = problem.cu_seqlens.to(torch.int32)
    plan = make_plan(boundaries, num_heads=2, head_dim=64, device="cpu")
    expected, _ = chunk_kda(*problem.inputs.values(), cu_seqlens=problem.cu_seqlens, **problem.keywords)
    boundaries.zero_()
    found, _ = chunk_kda(*problem.inputs.values(), plan=plan, **problem.keywords)
    assert torch.equal(found, expected)


def test_strided_inputs_give_the_bits_of_contiguous_ones():
    problem = make_problem((65, 20))
    expected = run(chunk_kda, problem, output_final_state=True)

    def strided(function):
        def call(*inputs, **keywords):
            padded = [torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in inputs]
            assert not padded[0].is_contiguous()
            return function(*padded, **keywords)

        return call

    found = run(strided(chunk_kda), problem, output_final_state=True)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_expanded_output_gradient():
    problem = make_problem((65,))
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in problem.inputs.items()}
    o, _ = chunk_kda(*leaves.values(), cu_seqlens=problem.cu_seqlens, **problem.keywords)
    o.sum().backward()
    twin = {name: tensor.clone().requires_grad_() for name, tensor in problem.inputs.items()}
    o, _ = chunk_kda(*twin.values(), cu_seqlens=problem.cu_seqlens, **problem.keywords)
    o.backward(torch.ones_like(o))
    assert all(torch.equal(leaves[name].grad, twin[name].grad) for name in leaves)


def test_last_launches_say_what_ran_and_why():
    problem = make_problem((65, 20))
    run(chunk_kda, problem, output_final_state=True)
    launched = last_launches()
    assert [one.program for one in launched] == ["chunk_prepare", "grad_scan", "chunk_grad", "parameter_reduce"]
    for one in launched[:3]:
        assert (one.variant, one.family) == ("bf16_k64", "cpu") and "bf16, K = V = 64" in one.reason
        assert one.origin in ("built", "cache")
    assert launched[0].grid == (3, 2, 1)  # three chunks, two value heads


def test_unknown_keywords_are_refused():
    problem = make_problem((5,))
    with pytest.raises(TypeError, match="cu_seqlen"):
        chunk_kda(*problem.inputs.values(), cu_seqlen=problem.cu_seqlens)


def replaced(name, change):
    def apply(arguments):
        arguments[name] = change(arguments[name])

    return apply


def given(**values):
    def apply(arguments):
        arguments.update(values)

    return apply


BAD = {
    "g of shape [B, T, H]": (replaced("g", lambda t: t[..., 0]), r"g has shape \[1, 20, 2\]"),
    "K of 32": (lambda a: a.update({n: a[n][..., :32] for n in ("q", "k", "v", "g")}), "K = 32 and V = 32"),
    "V unlike K": (replaced("v", lambda t: torch.cat([t, t], -1)), "K = 64 and V = 128"),
    "heads": (
        lambda a: a.update({n: a[n][:, :, :1] for n in ("v", "g")} | {"beta": a["beta"][:, :, :1]}),
        "q has 2 heads and v 1",
    ),
    "fp64": (replaced("q", lambda t: t.double()), "q is torch.float64 on cpu"),
    "mixed dtypes": (replaced("v", lambda t: t.half()), "v is torch.float16"),
    "not a tensor": (given(q=[1.0]), "q is list"),
    "decreasing": (given(cu_seqlens=torch.tensor([0, 12, 8, 20])), r"cu_seqlens\[2\] = 8 is below"),
    "short": (given(cu_seqlens=torch.tensor([0, 12])), "ends at 12 but the inputs hold 20"),
    "not from 0": (given(cu_seqlens=torch.tensor([1, 20])), "starts with 1"),
    "float boundaries": (given(cu_seqlens=torch.tensor([0.0, 20.0])), "torch.float32"),
    "bf16 state": (given(initial_state=torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)), "initial_state is torch.bf"),
    "state of another pack": (given(initial_state=torch.zeros(2, 2, 64, 64)), r"initial_state has shape \[2, 2"),
    "no A_log": (given(use_gate_in_kernel=True), "needs A_log"),
    "A_log without gate": (given(A_log=torch.zeros(2)), "would get no gradient"),
    "A_log shape": (given(use_gate_in_kernel=True, A_log=torch.zeros(3)), r"A_log has shape \[3\]"),
    "bound": (given(use_gate_in_kernel=True, lower_bound=-6.0), "lower_bound=-6.0"),
    "neg eigval": (given(allow_neg_eigval=True), "use_beta_sigmoid_in_kernel=True too"),
    "context": (given(cp_context=object()), "cp_context"),
    "device": (given(dt_bias=torch.zeros(128, device="meta"), A_log=torch.zeros(2), use_gate_in_kernel=True), "meta"),
    "family": (given(options=KdaOptions(family="sm90")), "cannot run on"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_inputs_are_refused_before_any_launch(case):
    change, message = BAD[case]
    arguments = dict(make_problem((20,), with_state=False).inputs)
    change(arguments)
    with pytest.raises(UnsupportedProblemError, match=message):
        chunk_kda(**arguments)


def test_a_plan_of_another_pack_is_refused():
    problem = make_problem((20,))
    plan = make_plan(torch.tensor([0, 21]), num_heads=2, head_dim=64, device="cpu")
    with pytest.raises(cake_kda_jit.PlanMismatchError, match="the plan was made for"):
        chunk_kda(*problem.inputs.values(), plan=plan, **problem.keywords)
    with pytest.raises(UnsupportedProblemError, match="B = 2"):
        chunk_kda(*(torch.cat([t, t]) for t in problem.inputs.values()), plan=plan)
