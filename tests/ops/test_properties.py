"""Random packs and options: values against FP64, and what must change no bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cake_kda_jit import KdaOptions, chunk_kda, make_plan
from cake_kda_jit.bench import problems
from cake_kda_jit.bench.precision import parameter_errors
from cake_kda_jit.bench.problems import NAMES, PARAMETER_BUDGET, Problem, make_problem, run
from cake_kda_jit.ops.workspace import tile_bytes_per_head

SETTINGS = settings(
    max_examples=40, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
PER_DOCUMENT = ("o", "dq", "dk", "dv", "dg", "dbeta")


@dataclass(frozen=True)
class Drawn:
    """One random call: a pack, how its problem is made, and options."""

    lengths: tuple[int, ...]
    regime: str
    heads: int
    group: int
    with_state: bool
    seed: int
    segment_tokens: int
    backward: str
    checkpoint_tokens: int
    keep_decayed_qk: bool = False

    def problem(self, dtype=torch.float32) -> Problem:
        return make_problem(
            self.lengths,
            regime=self.regime,
            heads=self.heads,
            value_heads=self.heads * self.group,
            dtype=dtype,
            seed=self.seed,
            with_state=self.with_state,
        )

    def call(self, problem: Problem, lengths=None, workspace_limit=None) -> dict[str, torch.Tensor]:
        """Outputs and gradients; ``lengths`` where the problem is a part of the drawn pack."""
        plan = make_plan(
            torch.tensor([0, *(self.lengths if lengths is None else lengths)]).cumsum(0),
            num_heads=self.heads,
            num_value_heads=self.heads * self.group,
            head_dim=64,
            device="cpu",
            segment_tokens=self.segment_tokens,
        )
        options = KdaOptions(
            self.backward, self.checkpoint_tokens, workspace_limit, keep_decayed_qk=self.keep_decayed_qk
        )
        return run(chunk_kda, problem, output_final_state=True, plan=plan, options=options)


# Short ones, those about a chunk's end, and any.
LENGTH = st.one_of(st.integers(0, 3), st.sampled_from([63, 64, 65, 127, 128, 129]), st.integers(0, 150))
CALLS = st.builds(
    Drawn,
    lengths=st.lists(LENGTH, min_size=1, max_size=5).map(tuple),
    regime=st.sampled_from(problems.REGIMES),
    heads=st.integers(1, 2),
    group=st.integers(1, 3),
    with_state=st.booleans(),
    seed=st.integers(0, 99),
    segment_tokens=st.sampled_from([0, 64, 128]),
    backward=st.sampled_from(["saved", "replay"]),
    checkpoint_tokens=st.sampled_from([64, 128, 512]),
)


@pytest.fixture(autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_same_bits(found, expected) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@SETTINGS
@given(drawn=CALLS)
def test_any_pack_has_the_values_of_fp64(drawn, nan_poison):
    assume(any(drawn.lengths))  # autograd cannot differentiate a reference that computes nothing
    problem = drawn.problem()
    found, expected = drawn.call(problem), problems.reference(problem)
    for name, tensor in found.items():
        assert tensor.isfinite().all(), name
        if name in ("dA_log", "ddt_bias"):
            continue
        # fp32 through and through: decays of 1e-7 each, sums of 64 products, the walk's 3e-7. A document's own part is
        # compared with at least its share of the pack's norm.
        for document, head, error in problems.local_errors(name, tensor, expected[name], problem):
            assert error <= 3e-5, (name, document, head)
    if any(length > 1 for length in drawn.lengths):
        A_log, _ = parameter_errors(found, expected, problem)
        # In norm, not per channel: in a pack of a few tokens a channel whose gates are all saturated has no terms.
        terms = expected["dg"].flatten(0, 1).abs().sum(0)
        bias = (found["ddt_bias"].double() - expected["ddt_bias"]).norm() / terms.norm()
        assert A_log <= PARAMETER_BUDGET and bias <= PARAMETER_BUDGET, (A_log, bias)


@SETTINGS
@given(drawn=CALLS, threads=st.integers(2, 5), other=st.sampled_from([64, 128, 512]))
def test_threads_head_blocks_and_backwards_change_no_bit(drawn, threads, other, nan_poison):
    problem = drawn.problem(torch.bfloat16)
    expected = drawn.call(problem)
    torch.set_num_threads(threads)
    assert_same_bits(drawn.call(problem), expected)
    torch.set_num_threads(1)
    chunks = sum(-(-length // 64) for length in drawn.lengths)
    one_group = max(1, drawn.group * tile_bytes_per_head(chunks, 64, 4, states=2, values=2))
    assert_same_bits(drawn.call(problem, workspace_limit=one_group), expected)
    for backward, keep in (("saved", False), ("saved", True), ("replay", False)):
        options = {"backward": backward, "checkpoint_tokens": other, "keep_decayed_qk": keep}
        assert_same_bits(replace(drawn, **options).call(problem), expected)


@SETTINGS
@given(drawn=CALLS, index=st.integers(0, 4))
def test_neighbours_change_no_bit(drawn, index, nan_poison):
    """A document alone has the bits that it has in the pack, given the same gradients of its outputs."""
    index %= len(drawn.lengths)
    problem = drawn.problem(torch.bfloat16)
    start = sum(drawn.lengths[:index])
    end = start + drawn.lengths[index]
    generator = torch.Generator().manual_seed(5)
    do = torch.randn(problem.inputs["v"].shape, generator=generator).to(torch.bfloat16)
    heads = drawn.heads * drawn.group
    dfinal_state = torch.randn(len(drawn.lengths), heads, 64, 64, generator=generator)
    whole = gradients_of(drawn, problem, drawn.lengths, do, dfinal_state)
    keywords = dict(problem.keywords)
    if drawn.with_state:
        keywords["initial_state"] = keywords["initial_state"][index : index + 1]
    inputs = {name: tensor[:, start:end] for name, tensor in problem.inputs.items()}
    alone = gradients_of(
        drawn,
        Problem(inputs, keywords),
        drawn.lengths[index : index + 1],
        do[:, start:end],
        dfinal_state[index : index + 1],
    )
    for name in PER_DOCUMENT:
        assert torch.equal(alone[name], whole[name][:, start:end]), name
    for name in {"final_state", "dinitial_state"} & set(whole):
        assert torch.equal(alone[name], whole[name][index : index + 1]), name


def gradients_of(drawn: Drawn, problem: Problem, lengths, do, dfinal_state) -> dict[str, torch.Tensor]:
    """Outputs and gradients of a part of the drawn pack for given gradients of its outputs."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in problem.leaves().items()}
    keywords = problem.keywords | {name: leaf for name, leaf in leaves.items() if name not in NAMES}
    plan = make_plan(
        torch.tensor([0, *lengths]).cumsum(0),
        num_heads=drawn.heads,
        num_value_heads=drawn.heads * drawn.group,
        head_dim=64,
        device="cpu",
        segment_tokens=drawn.segment_tokens,
    )
    options = KdaOptions(drawn.backward, drawn.checkpoint_tokens)
    inputs = (leaves[name] for name in NAMES)
    o, final_state = chunk_kda(*inputs, plan=plan, output_final_state=True, options=options, **keywords)
    torch.autograd.backward([o, final_state], [do, dfinal_state])
    return {"o": o.detach(), "final_state": final_state.detach()} | {"d" + n: leaf.grad for n, leaf in leaves.items()}
