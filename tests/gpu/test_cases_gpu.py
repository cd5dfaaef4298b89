"""Attention cases from public reports on a CUDA device, forward. docs/cases-attention.md names the reports."""

from __future__ import annotations

import math

import pytest
import torch

from cake_kda_jit import UnsupportedProblemError, chunk_kda
from cake_kda_jit.bench.problems import NAMES, REGIMES, Problem, make_problem, relative_error

from ..cases.attention import assert_nothing_is_built, part_of, ready_problem, slow_decay_problem
from ..cases.test_attention_bits import CAUSAL, FUTURES, with_future
from ..cases.test_attention_calls import BOUNDARIES
from ..cases.test_attention_cases import repeated_heads, sliced_from_padded_rows
from .forwards import assert_same_bits, assert_within_budget, exact, forward, plan_of
from .twins import on_device

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_poison")]


@pytest.mark.parametrize("heads, group", [(2, 2), (1, 4), (3, 2)])
def test_grouped_heads_equal_repeated_heads(heads, group):
    problem = make_problem((70, 0, 21), heads=heads, value_heads=heads * group)
    assert_same_bits(forward(problem), forward(repeated_heads(problem, group)))


@pytest.mark.parametrize("segment_tokens", [None, 64])
def test_gates_that_differ_by_4_per_head(segment_tokens):
    problem = make_problem((150, 40), heads=5, regime="softplus")
    problem.keywords["A_log"] = math.log(4.0) * torch.arange(5.0) - 1.0
    found = forward(problem, segment_tokens)
    assert_within_budget(found, exact(problem), problem, "softplus")
    for head in range(5):
        inputs = {name: tensor[:, :, head : head + 1] for name, tensor in problem.inputs.items()}
        keywords = problem.keywords | {
            "A_log": problem.keywords["A_log"][head : head + 1],
            "dt_bias": problem.keywords["dt_bias"].view(5, -1)[head],
            "initial_state": problem.keywords["initial_state"][:, head : head + 1],
        }
        one = forward(Problem(inputs, keywords, problem.cu_seqlens), segment_tokens)
        assert torch.equal(one["o"][:, :, 0], found["o"][:, :, head]), head
        assert torch.equal(one["final_state"][:, 0], found["final_state"][:, head]), head


@pytest.mark.parametrize("future", FUTURES)
@pytest.mark.parametrize("tokens, prefix, segment_tokens", CAUSAL)
def test_later_tokens_change_nothing_earlier(tokens, prefix, segment_tokens, future):
    problem = ready_problem((tokens,), gate=(-0.8, -0.6), beta=1.0, heads=4, dtype=torch.bfloat16)
    expected = forward(problem, segment_tokens)["o"]
    found = forward(with_future(problem, prefix, future), segment_tokens)["o"]
    assert torch.equal(found[:, :prefix], expected[:, :prefix])


@pytest.mark.parametrize("prefix, segment_tokens", [(64, None), (128, None), (128, 64), (192, 64)])
def test_later_nan_reaches_no_earlier_chunk(prefix, segment_tokens):
    """Within a chunk it does: tensor cores multiply the zeros above the diagonal of Aqk by every row of v'."""
    problem = ready_problem((200,), gate=(-0.8, -0.6), beta=1.0, dtype=torch.bfloat16)
    inputs = {name: tensor.clone() for name, tensor in problem.inputs.items()}
    for tensor in inputs.values():
        tensor[:, prefix:] = torch.nan
    found = forward(Problem(inputs, problem.keywords, problem.cu_seqlens), segment_tokens)["o"]
    assert torch.equal(found[:, :prefix], forward(problem, segment_tokens)["o"][:, :prefix])


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(
    "prefix, tokens, segment_tokens", [(21, 22, None), (21, 200, None), (63, 64, None), (64, 65, 64), (128, 300, 128)]
)
def test_appended_tokens_change_nothing_earlier(prefix, tokens, segment_tokens, regime):
    problem = make_problem((tokens,), regime=regime)
    short = forward(part_of(problem, 0, prefix), segment_tokens)["o"]
    assert torch.equal(forward(problem, segment_tokens)["o"][:, :prefix], short)


@pytest.mark.parametrize("lengths", [(64,), (1,) * 64, (65, 1, 2, 130)], ids=["one chunk", "one token", "mixed"])
@pytest.mark.parametrize("form", ["ready", "bounded", "softplus"])
def test_gates_of_minus_5_everywhere(form, lengths):
    problem = make_problem(lengths)
    if form == "ready":
        problem = ready_problem(lengths, gate=(-5.0, -5.0), dtype=torch.bfloat16)
    elif form == "bounded":
        problem.inputs["g"].fill_(40.0)
    else:
        problem.inputs["g"].fill_(math.log(math.expm1(5.0)))
        problem.keywords |= {"A_log": torch.zeros(2), "dt_bias": torch.zeros(128), "lower_bound": None}
    assert_within_budget(forward(problem), exact(problem), problem, "bounded")


@pytest.mark.parametrize("A_log", [None, 0.0, 2.0, 100.0])
@pytest.mark.parametrize("raw", [20.0, -20.0, 1e4])
def test_saturated_bounded_gates(raw, A_log):
    problem = make_problem((70, 1))
    problem.inputs["g"][:, ::3] = raw
    del problem.keywords["dt_bias"]
    problem.keywords["A_log"] = None if A_log is None else torch.full((2,), A_log)
    assert_within_budget(forward(problem), exact(problem), problem, "bounded")


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("shifted", [-7.0, -12.0, -18.0, -30.0])
def test_gate_accuracy_of_slow_decays(shifted, lower_bound):
    """One token, beta 0: final_state is e^g times the initial state, in fp32."""
    problem, x, amplitude = slow_decay_problem(shifted, lower_bound, torch.bfloat16)
    g = -amplitude * torch.log1p(x.exp()) if lower_bound is None else lower_bound * torch.sigmoid(amplitude * x)
    decay = forward(problem)["final_state"].cpu().double() / problem.keywords["initial_state"].double()
    assert (decay.log() - g).abs().max() < 1e-6


@pytest.mark.parametrize("beta", [1.0, 0.95])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_correlated_keys_with_beta_1_and_weak_gates(head_dim, beta):
    problem = make_problem((200,), regime="correlated", head_dim=head_dim)
    generator = torch.Generator().manual_seed(5)
    problem.inputs |= {
        "g": torch.empty(problem.inputs["g"].shape).uniform_(-0.034, -0.012, generator=generator),
        "beta": torch.full(problem.inputs["beta"].shape, beta),
    }
    problem.keywords = {"use_qk_l2norm_in_kernel": True, "initial_state": problem.keywords["initial_state"]}
    assert_within_budget(forward(problem), exact(problem), problem, "correlated")


@pytest.mark.parametrize("cut", [64, 128, 192, 1, 21, 63, 65, 199])
@pytest.mark.parametrize("regime", ["softplus", "bounded"])
def test_one_run_equals_two_with_the_state_handed_over(regime, cut):
    problem = make_problem((200,), heads=1, value_heads=2, regime=regime)
    first = forward(part_of(problem, 0, cut))
    second = part_of(problem, cut, 200)
    second.keywords = problem.keywords | {"initial_state": first["final_state"]}
    second = forward(second)
    found = {"o": torch.cat([first["o"], second["o"]], dim=1), "final_state": second["final_state"]}
    assert_within_budget(found, exact(problem), problem, regime)
    if cut % 64 == 0:  # the chunks are the same, and a state is handed over in full
        assert_same_bits(found, forward(problem))


@pytest.mark.parametrize("boundaries", [(0, 0, 64, 64, 64, 100, 100), (0, 0), (0, 0, 0), (0, 130, 130)])
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("segment_tokens", [None, 64])
def test_empty_documents_return_their_state(boundaries, state_v_first, segment_tokens):
    lengths = [end - start for start, end in zip(boundaries, boundaries[1:])]
    problem = make_problem(lengths)
    problem.keywords["state_v_first"] = state_v_first
    found = forward(problem, segment_tokens)
    empty = [index for index, length in enumerate(lengths) if length == 0]
    assert torch.equal(found["final_state"][empty].cpu(), problem.keywords["initial_state"][empty])
    filled = [index for index, length in enumerate(lengths) if length]
    if filled:
        kept = torch.tensor([0, *(lengths[index] for index in filled)]).cumsum(0)
        state = problem.keywords["initial_state"][filled]
        without = Problem(problem.inputs, problem.keywords | {"initial_state": state}, kept)
        expected = forward(without, segment_tokens)
        assert torch.equal(found["final_state"][filled], expected["final_state"])
        assert torch.equal(found["o"], expected["o"])


def test_inputs_sliced_from_padded_rows():
    """What lies between the slices is NaN: reading it would show."""
    problem = make_problem((70, 9), heads=2, value_heads=4)
    wide = {name: on_device(tensor) for name, tensor in sliced_from_padded_rows(problem).items()}
    views = {n: t[:, 2:-1, 1:, 8:-16] if t.dim() == 4 else t[:, 2:-1, 1:] for n, t in wide.items()}
    assert not any(view.is_contiguous() for view in views.values())
    assert_same_bits(forward(Problem(views, problem.keywords, problem.cu_seqlens)), forward(problem))


@pytest.mark.parametrize("case", BOUNDARIES)
def test_malformed_boundaries_are_refused_with_the_offending_values(case):
    boundaries, message = BOUNDARIES[case]
    inputs = {name: tensor.cuda() for name, tensor in make_problem((16,), heads=1, with_state=False).inputs.items()}
    if isinstance(boundaries, torch.Tensor) and boundaries.device.type == "cpu":
        boundaries = boundaries.cuda()
    with pytest.raises(UnsupportedProblemError, match=message):
        chunk_kda(**inputs, cu_seqlens=boundaries)


def test_2048_short_documents():
    """Of 0 to 3 tokens, 64 heads: 131,072 pairs of document and head, more than a grid's second size."""
    lengths = [index % 4 for index in range(2048)]
    problem = make_problem(lengths, heads=64, regime="softplus")
    found = forward(problem)
    empty = torch.tensor(lengths) == 0
    assert torch.equal(found["final_state"].cpu()[empty], problem.keywords["initial_state"][empty])
    some = 40  # documents of which FP64 is asked: one head at a time would take minutes for all
    tokens = sum(lengths[:some])
    part = Problem(
        {name: tensor[:, :tokens] for name, tensor in problem.inputs.items()},
        problem.keywords | {"initial_state": problem.keywords["initial_state"][:some]},
        problem.cu_seqlens[: some + 1],
    )
    head = {"o": found["o"][:, :tokens], "final_state": found["final_state"][:some]}
    assert_within_budget(head, exact(part), part, "softplus")


def test_20_packs_after_the_warm_up_compile_and_load_nothing(monkeypatch):
    def step(lengths, segment_tokens, _):
        problem = make_problem(lengths, heads=1, value_heads=2, seed=len(lengths)).to("cuda")
        plan = plan_of(problem, segment_tokens=segment_tokens)
        chunk_kda(*(problem.inputs[name] for name in NAMES), plan=plan, **problem.keywords)

    assert_nothing_is_built(monkeypatch, step)


@pytest.mark.parametrize("segment_tokens", [None, 64])
def test_hard_resets_forget_exactly(segment_tokens):
    """A gate of -inf: another initial state changes no bit from there on."""
    problem = ready_problem((200,), gate=(-0.8, -0.6), dtype=torch.bfloat16)
    problem.inputs["g"][:, 130] = -torch.inf
    found = forward(problem, segment_tokens)
    other = Problem(problem.inputs, problem.keywords | {"initial_state": problem.keywords["initial_state"] * 3})
    other.cu_seqlens = problem.cu_seqlens
    again = forward(other, segment_tokens)
    assert torch.equal(found["o"][:, 130:], again["o"][:, 130:])
    assert torch.equal(found["final_state"], again["final_state"])
    assert relative_error(found["o"], exact(problem)["o"]) < 4e-3
