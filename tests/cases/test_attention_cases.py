"""Attention cases from public reports: right values. docs/cases-attention.md names each test's report."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.nn.functional import normalize

from cake_kda_jit import KdaOptions, chunk_kda
from cake_kda_jit.bench import problems
from cake_kda_jit.bench.problems import NAMES, Problem, make_problem, relative_error, run

from .attention import (
    assert_near_fp64,
    assert_same_bits,
    assert_within_budgets,
    call,
    part_of,
    ready_problem,
    slow_decay_problem,
    weighted,
)

pytestmark = pytest.mark.usefixtures("nan_poison")

GATE_GRADIENTS = ("dg", "dA_log", "ddt_bias")


# ---- grouped value heads, gates that differ per head -----------------------------------------------------------------


def repeated_heads(problem: Problem, group: int) -> Problem:
    """The same problem with each q and k head written out once per value head of its group."""
    repeated = {name: problem.inputs[name].repeat_interleave(group, dim=2) for name in ("q", "k")}
    return dataclasses.replace(problem, inputs=problem.inputs | repeated)


@pytest.mark.parametrize("heads, group", [(2, 2), (1, 4), (3, 2)])
@pytest.mark.parametrize("in_kernel", [True, False], ids=["l2norm", "ready"])
def test_grouped_heads_equal_repeated_heads(heads, group, in_kernel):
    problem = make_problem((70, 0, 21), heads=heads, value_heads=heads * group, dtype=torch.float32)
    if not in_kernel:
        problem.keywords["use_qk_l2norm_in_kernel"] = False
        problem.inputs |= {name: normalize(problem.inputs[name], dim=-1) for name in ("q", "k")}
    found = call(problem, weighted())
    expected = call(repeated_heads(problem, group), weighted())
    for name in ("dq", "dk"):
        summed = expected.pop(name).unflatten(2, (heads, group)).double().sum(3)
        # fp32 sums of `group` terms, before instead of after the norm's backward
        assert relative_error(found[name], summed) < 2e-6, name
    assert_same_bits(found, expected, *expected)


@pytest.mark.parametrize("segment_tokens", [None, 64])
def test_gates_that_differ_by_4_per_head(segment_tokens):
    """Decays of e^-0.01 to e^-2.6 a token side by side; each head also equals its own run to the bit."""
    problem = make_problem((150, 40), heads=5, regime="softplus", dtype=torch.float32)
    problem.keywords["A_log"] = math.log(4.0) * torch.arange(5.0) - 1.0
    found = call(problem, weighted(), segment_tokens)
    expected = problems.reference(problem)
    found_fixed = run(chunk_kda, problem, output_final_state=True)
    assert_near_fp64(found_fixed, expected)
    for head in range(5):
        alone = {name: tensor[:, :, head : head + 1] for name, tensor in problem.inputs.items()}
        keywords = problem.keywords | {
            "A_log": problem.keywords["A_log"][head : head + 1],
            "dt_bias": problem.keywords["dt_bias"].view(5, -1)[head],
            "initial_state": problem.keywords["initial_state"][:, head : head + 1],
        }

        def loss(o, final_state, head=head):
            generator = torch.Generator().manual_seed(7)
            weights = [torch.randn(found[name].shape, generator=generator) for name in ("o", "final_state")]
            return (o * weights[0][:, :, head : head + 1]).sum() + (final_state * weights[1][:, head : head + 1]).sum()

        one = call(Problem(alone, keywords, problem.cu_seqlens), loss, segment_tokens)
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            assert torch.equal(one[name][:, :, 0], found[name][:, :, head]), (name, head)
        for name in ("final_state", "dinitial_state"):
            assert torch.equal(one[name][:, 0], found[name][:, head]), (name, head)
        assert torch.equal(one["dA_log"][0], found["dA_log"][head])
        assert torch.equal(one["ddt_bias"], found["ddt_bias"].view(5, -1)[head])


# ---- gates at their ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(64,), (1,) * 64, (65, 1, 2, 130)], ids=["one chunk", "one token", "mixed"])
@pytest.mark.parametrize("form", ["ready", "bounded", "softplus"])
def test_gates_of_minus_5_everywhere(form, lengths):
    """Ready, from a saturated sigmoid, and from a softplus of 5 (its raw value is log(e^5 - 1))."""
    problem = make_problem(lengths, dtype=torch.float32, with_state=False)
    if form == "ready":
        problem = ready_problem(lengths, gate=(-5.0, -5.0), with_state=False)
    elif form == "bounded":
        problem.inputs["g"].fill_(40.0)
    else:
        problem.inputs["g"].fill_(math.log(math.expm1(5.0)))
        problem.keywords |= {"A_log": torch.zeros(2), "dt_bias": torch.zeros(128), "lower_bound": None}
    found = run(chunk_kda, problem, output_final_state=True)
    expected = problems.reference(problem)
    if max(lengths) == 1:
        assert not any(found.pop(name).any() for name in GATE_GRADIENTS if name in found)
    elif form == "bounded":  # the sigmoid's slope at 40 is below 1e-14, and fp32 may call it 0
        assert max(found.pop(name).abs().max() for name in GATE_GRADIENTS) < 1e-12
    assert_near_fp64(found, expected)


@pytest.mark.parametrize("output_gradient_only", [True, False])
@pytest.mark.parametrize("form", ["ready", "bounded", "softplus"])
def test_one_token_documents_have_no_gate_gradient(form, output_gradient_only):
    """Nothing is there to decay: dg, dA_log and ddt_bias are exactly 0, beside documents whose dg is not."""
    lengths = (1, 1, 30, 1, 0, 1)
    problem = make_problem(lengths, with_state=False, regime="softplus" if form == "softplus" else "bounded")
    if form == "ready":
        problem = ready_problem(lengths, gate=(-2.0, 0.0), with_state=False)
    loss = (lambda o, final_state: o.float().square().sum()) if output_gradient_only else weighted()
    found = call(problem, loss)
    assert found["dg"][:, 2:32].any()
    assert not found["dg"][:, :2].any() and not found["dg"][:, 32:].any()
    alone = make_problem((1,) * 8, with_state=False)
    found = call(alone, loss)
    assert not any(found[name].any() for name in ("dg", "dA_log", "ddt_bias"))


@pytest.mark.parametrize("A_log", [None, 0.0, 2.0, 100.0])
@pytest.mark.parametrize("raw", [20.0, -20.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saturated_bounded_gates(dtype, raw, A_log):
    """Raw gates far outside the sigmoid's slope: decays of 0 or -5, finite gradients, never 0 * inf."""
    problem = make_problem((70, 1), dtype=dtype)
    problem.inputs["g"][:, ::3] = raw
    del problem.keywords["dt_bias"]
    problem.keywords["A_log"] = None if A_log is None else torch.full((2,), A_log)
    found = run(chunk_kda, problem, output_final_state=True)
    expected = problems.reference(problem)
    assert_within_budgets(found, expected, problem, "bounded")


@pytest.mark.parametrize("A_log", [0.0, 4.0, 100.0])
@pytest.mark.parametrize("raw", [20.0, -20.0, 100.0])
def test_softplus_gates_far_out(raw, A_log):
    """From no decay at all to one that overflows to a hard reset: finite, and the values of FP64."""
    problem = make_problem((70, 1), regime="softplus", dtype=torch.float32)
    problem.inputs["g"][:, ::3] = raw
    problem.keywords |= {"A_log": torch.full((2,), A_log), "dt_bias": torch.zeros(128)}
    found = run(chunk_kda, problem, output_final_state=True)
    expected = problems.reference(problem)
    # Between a decay of 1 and a hard reset almost no gate has a slope: the relative error of what is left means little.
    for name in GATE_GRADIENTS:
        assert (found[name] - expected[name]).norm() <= 2e-5 * max(1.0, expected[name].norm()), name
    assert_near_fp64({name: tensor for name, tensor in found.items() if name not in GATE_GRADIENTS}, expected)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("shifted", [-7.0, -12.0, -18.0, -30.0])
def test_gate_accuracy_of_slow_decays(shifted, lower_bound):
    """One token, beta 0: final_state is e^g times the initial state, dA_log is the sum of dg g, dg's raw is dx.

    A log(1 + exp(x)) without log1p is 0 below -16.6. 1e-6 absolute for the gate, as reported, and relative for g and
    its slope: a handful of fp32 operations.
    """
    problem, x, amplitude = slow_decay_problem(shifted, lower_bound, torch.float32)
    found = call(problem, lambda o, final_state: final_state.sum())
    if lower_bound is None:
        g, slope = -amplitude * torch.log1p(x.exp()), -amplitude * torch.sigmoid(x)
    else:
        g = lower_bound * torch.sigmoid(amplitude * x)
        slope = lower_bound * amplitude * torch.sigmoid(amplitude * x) * torch.sigmoid(-amplitude * x)
    state = problem.keywords["initial_state"].double()
    decay = found["final_state"].double() / state
    assert (decay.log() - g).abs().max() < 1e-6
    dg = (g.exp() * state[0, 0]).sum(-1)
    assert ((found["dg"].double()[0, 0, 0] - dg * slope).norm() / (dg * slope).norm()) < 1e-6
    dA_log = (dg * (g if lower_bound is None else slope * x)).sum()
    # a sum over 64 channels of either sign
    terms = (dg * g).abs().sum()
    assert (found["dA_log"].double() - dA_log).abs() / terms < 1e-6


# ---- correlated keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [1.0, 0.95])
@pytest.mark.parametrize("head_dim, dtype", [(64, torch.bfloat16), (128, torch.bfloat16), (64, torch.float32)])
def test_correlated_keys_with_beta_1_and_weak_gates(head_dim, dtype, beta):
    """Keys of cosine 0.9: a truncated Neumann series of the triangular inverse is 30 % wrong here."""
    problem = make_problem((200,), regime="correlated", head_dim=head_dim, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    problem.inputs |= {
        "g": torch.empty(problem.inputs["g"].shape).uniform_(-0.034, -0.012, generator=generator),
        "beta": torch.full(problem.inputs["beta"].shape, beta),
    }
    problem.keywords = {
        "use_qk_l2norm_in_kernel": True,
        "initial_state": problem.keywords["initial_state"],
    }
    found = run(chunk_kda, problem, output_final_state=True)
    expected = problems.reference(problem)
    assert_within_budgets(found, expected, problem, "correlated")
    if dtype == torch.float32:
        assert_near_fp64(found, expected)


# ---- the state handed over, empty documents --------------------------------------------------------------------------


def handed_over(problem: Problem, cut: int, loss) -> dict[str, torch.Tensor]:
    """Two runs, the second from the first one's final state, one backward through both."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in problem.leaves().items()}
    keywords = problem.keywords | {name: leaf for name, leaf in leaves.items() if name not in NAMES}
    first, second = ([leaves[n][:, part] for n in NAMES] for part in (slice(0, cut), slice(cut, None)))
    o_first, state = chunk_kda(*first, output_final_state=True, **keywords)
    o_second, final_state = chunk_kda(*second, output_final_state=True, **keywords | {"initial_state": state})
    o = torch.cat([o_first, o_second], dim=1)
    loss(o, final_state).backward()
    return {"o": o.detach(), "final_state": final_state.detach()} | {"d" + n: leaf.grad for n, leaf in leaves.items()}


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("cut", [64, 128, 192, 1, 21, 63, 65, 199])
@pytest.mark.parametrize("regime", ["softplus", "bounded"])
def test_one_run_equals_two_with_the_state_handed_over(regime, cut, state_v_first):
    problem = make_problem((200,), heads=1, value_heads=2, regime=regime, dtype=torch.float32)
    problem.keywords["state_v_first"] = state_v_first
    whole = call(problem, weighted())
    found = handed_over(problem, cut, weighted())
    for name, tensor in found.items():
        # fp32 rounding of other orders of the same sums; parameters are sums that cancel
        limit = 2e-5 if name in ("dA_log", "ddt_bias") else 3e-6
        assert relative_error(tensor, whole[name].double()) < limit, name
    if cut % 64 == 0:  # the chunks are the same, and a state is handed over in full: all but the parameters' sums
        assert_same_bits(found, whole, "o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")


@pytest.mark.parametrize("cut", [64, 21])
def test_a_state_handed_over_without_gradient_stops_it(cut):
    """The second run's gradients are the whole's for a loss behind the cut; its own state gets the chain's link."""
    problem = make_problem((100,), heads=1, dtype=torch.float32)
    weights = torch.randn(problem.inputs["v"][:, cut:].shape, generator=torch.Generator().manual_seed(7))
    first = call(part_of(problem, 0, cut), lambda o, state: o.sum())
    second = part_of(problem, cut, 100)
    second.keywords = problem.keywords | {"initial_state": first["final_state"]}
    found = call(second, lambda o, state: (o * weights).sum())
    whole = call(problem, lambda o, state: (o[:, cut:] * weights).sum())
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert relative_error(found[name], whole[name][:, cut:].double()) < 3e-6, name
    link = call(part_of(problem, 0, cut), lambda o, state: (state * found["dinitial_state"]).sum())
    assert relative_error(link["dinitial_state"], whole["dinitial_state"].double()) < 3e-6


@pytest.mark.parametrize("boundaries", [(0, 0, 64, 64, 64, 100, 100), (0, 0), (0, 0, 0), (0, 130, 130)])
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("segment_tokens, backward", [(None, "saved"), (None, "replay"), (64, "saved")])
def test_empty_documents_return_their_state_and_pass_its_gradient(boundaries, state_v_first, segment_tokens, backward):
    lengths = [end - start for start, end in zip(boundaries, boundaries[1:])]
    problem = make_problem(lengths, dtype=torch.float32)
    problem.keywords["state_v_first"] = state_v_first
    weights = torch.randn(problem.keywords["initial_state"].shape, generator=torch.Generator().manual_seed(2))
    options = KdaOptions(backward=backward)
    found = call(problem, lambda o, s: o.sum() + (s * weights).sum(), segment_tokens, options=options)
    empty = [index for index, length in enumerate(lengths) if length == 0]
    assert torch.equal(found["final_state"][empty], problem.keywords["initial_state"][empty])
    assert torch.equal(found["dinitial_state"][empty], weights[empty])
    filled = [index for index, length in enumerate(lengths) if length]
    if filled:
        inputs = dict(problem.inputs)
        kept = torch.tensor([0, *(lengths[index] for index in filled)]).cumsum(0)
        state = problem.keywords["initial_state"][filled]
        without = Problem(inputs, problem.keywords | {"initial_state": state}, kept)
        expected = call(without, lambda o, s: o.sum() + (s * weights[filled]).sum(), segment_tokens, options=options)
        assert torch.equal(found["final_state"][filled], expected.pop("final_state"))
        assert torch.equal(found["dinitial_state"][filled], expected.pop("dinitial_state"))
        assert_same_bits(found, expected)


def test_empty_documents_without_an_initial_state_end_in_zeros():
    problem = make_problem((0, 64, 0, 36, 0), with_state=False)
    found = call(problem, weighted())
    assert not found["final_state"][[0, 2, 4]].any() and found["final_state"][1].any()


# ---- strides ---------------------------------------------------------------------------------------------------------


def sliced_from_padded_rows(problem: Problem) -> dict[str, torch.Tensor]:
    """q, k, v as slices of one projection's rows, g and beta of another's, rows padded at both ends: leaves and views.

    What lies between the slices is NaN: reading it would show.
    """
    padded = {}
    for name, tensor in problem.inputs.items():
        wide = torch.full((1, tensor.shape[1] + 3, tensor.shape[2] + 1, *[n + 24 for n in tensor.shape[3:]]), torch.nan)
        wide = wide.to(tensor.dtype)
        view = wide[:, 2:-1, 1:, 8:-16] if tensor.dim() == 4 else wide[:, 2:-1, 1:]
        view.copy_(tensor)
        padded[name] = wide
    return padded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inputs_sliced_from_padded_rows_and_a_plain_sum(dtype):
    """y.sum().backward() hands an expanded gradient of stride 0 to the kernel; its values are those of ones."""
    problem = make_problem((70, 9), dtype=dtype, heads=2, value_heads=4)
    wide = {name: tensor.requires_grad_() for name, tensor in sliced_from_padded_rows(problem).items()}
    views = [t[:, 2:-1, 1:, 8:-16] if t.dim() == 4 else t[:, 2:-1, 1:] for t in wide.values()]
    assert not any(view.is_contiguous() for view in views)
    o, _ = chunk_kda(*views, cu_seqlens=problem.cu_seqlens, **problem.keywords)
    o.sum().backward()
    expected = call(problem, lambda o, final_state: o.sum())
    assert torch.equal(o, expected["o"])
    for name, tensor in wide.items():
        inner = tensor.grad[:, 2:-1, 1:, 8:-16] if tensor.dim() == 4 else tensor.grad[:, 2:-1, 1:]
        assert torch.equal(inner, expected["d" + name]), name
        inner.zero_()
        assert not tensor.grad.any(), f"{name} got a gradient outside its slice"
