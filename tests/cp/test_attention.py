"""chunk_kda on ranks of a VirtualGroup: values against FP64, and what must change no bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cake_kda_jit import (
    KcpContext,
    KcpOptions,
    KdaOptions,
    Partition,
    PlanMismatchError,
    UnsupportedProblemError,
    VirtualGroup,
    chunk_kda,
    last_launches,
    run_virtual,
)
from cake_kda_jit.bench import problems
from cake_kda_jit.bench.precision import parameter_errors
from cake_kda_jit.bench.problems import BUDGETS, LOCAL_FACTOR, NAMES, PARAMETER_BUDGET, make_problem
from cake_kda_jit.cp import passes, tables
from cake_kda_jit.cp.plan import ParallelPlan
from cake_kda_jit.ops.select import SegmentRule
from cake_kda_jit.ops.workspace import tile_bytes_per_head

from .ranks import EXCHANGES, LAYOUTS, assert_same_bits, attention, boundaries, partitions, run_ranks

SETTINGS = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LENGTH = st.one_of(st.integers(0, 4), st.sampled_from([63, 64, 65, 128]), st.integers(0, 140))
PARTITIONS = partitions(st.lists(LENGTH, min_size=1, max_size=4))
PACK = (130, 0, 1, 200, 63, 3)

# fp32 inputs show the arithmetic alone: products of up to 64 decays of 1e-7 each, and sums of 64 terms.
FP32_TOLERANCE = 2e-5


def lengths_of(partition: Partition) -> list[int]:
    return [end - start for start, end in zip(partition.cu_seqlens, partition.cu_seqlens[1:])]


def problem_of(partition: Partition, **how) -> problems.Problem:
    return make_problem(lengths_of(partition), **how)


def assert_within_budgets(found, expected, problem, regime) -> None:
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), name
        if name in ("dA_log", "ddt_bias"):
            continue
        budget = BUDGETS[regime]["final_state" if name == "dinitial_state" else name]
        assert problems.relative_error(tensor, expected[name]) <= budget, name
        for document, head, error in problems.local_errors(name, tensor, expected[name], problem):
            assert error <= LOCAL_FACTOR * budget, (name, document, head)
    assert max(parameter_errors(found, expected, problem)) <= PARAMETER_BUDGET


@dataclass(frozen=True)
class Drawn:
    """A random call: how its problem is made, and options. ``gate``: raw as in the regime, ready, or without A_log.

    ``cut``: which spans are cut in segments.
    """

    regime: str
    gate: str
    group: int
    with_state: bool
    seed: int
    cut: str
    options: KcpOptions

    def problem(self, partition: Partition) -> problems.Problem:
        problem = problem_of(
            partition,
            regime=self.regime,
            heads=2,
            value_heads=2 * self.group,
            with_state=self.with_state,
            seed=self.seed,
            dtype=torch.float32,
        )
        if self.gate == "no A_log":
            del problem.keywords["A_log"]
            problem.keywords["lower_bound"] = -5.0
        elif self.gate == "ready":
            problem.inputs["g"] = -problem.inputs["g"].abs()
            problem.inputs["beta"] = torch.sigmoid(problem.inputs["beta"])
            kept = ("initial_state", "use_qk_l2norm_in_kernel")
            problem.keywords = {name: value for name, value in problem.keywords.items() if name in kept}
        return problem


CALLS = st.builds(
    Drawn,
    regime=st.sampled_from(problems.REGIMES),
    gate=st.sampled_from(["raw", "raw", "ready", "no A_log"]),
    group=st.sampled_from([1, 2]),
    with_state=st.booleans(),
    seed=st.integers(0, 99),
    cut=st.sampled_from(["no spans", "inner spans", "all spans"]),
    options=st.builds(
        lambda kept, **others: KcpOptions(kept[0], keep_decayed_qk=kept[1], **others),
        kept=st.sampled_from([("saved", False), ("saved", True), ("replay", False)]),
        checkpoint_tokens=st.sampled_from([64, 128]),
        exchange=st.sampled_from(EXCHANGES),
    ),
)


@settings(SETTINGS, max_examples=30)
@given(partition=PARTITIONS, drawn=CALLS)
def test_random_packs_against_fp64(partition, drawn, nan_poison):
    """fp32 inputs: every output and gradient of every layout, gate form and backward, at the error of fp32."""
    assume(partition.num_tokens > 0)
    problem = drawn.problem(partition)
    expected = problems.reference(problem)
    with pytest.MonkeyPatch.context() as patch:
        if drawn.cut == "all spans":
            patch.setattr(tables, "segment_rule", lambda *_: SegmentRule(64, 65))
        if drawn.cut == "inner spans":
            patch.setattr(tables, "segment_rule", lambda *_: SegmentRule(0, 0))
            patch.setattr(tables, "INNER_RULE", SegmentRule(64, 65))
        found = attention(problem, partition, drawn.options).whole
    # A gradient that is 0 in exact arithmetic has no relative error: that of the whole pack's is the measure.
    for name, tensor in expected.items():
        scale = max(tensor.norm().item(), 1e-3 * tensor.numel() ** 0.5)
        limit = PARAMETER_BUDGET if name in ("dA_log", "ddt_bias") else FP32_TOLERANCE
        assert (found[name].double() - tensor).norm().item() <= limit * scale, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("regime", problems.REGIMES)
def test_bf16_within_the_budgets_of_one_device(regime, layout, nan_poison):
    partition = getattr(Partition, layout)(boundaries(PACK), 4)
    problem = problem_of(partition, regime=regime)
    found = attention(problem, partition).whole
    assert_within_budgets(found, problems.reference(problem), problem, regime)


@pytest.mark.parametrize("cut", ["no spans", "inner spans", "all spans"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exchanges_backwards_and_head_blocks_change_no_bit(layout, cut, nan_poison, monkeypatch):
    rule = SegmentRule(64, 65) if cut == "all spans" else SegmentRule(0, 0)
    monkeypatch.setattr(tables, "segment_rule", lambda *_: rule)
    if cut == "inner spans":
        monkeypatch.setattr(tables, "INNER_RULE", SegmentRule(64, 65))
    partition = getattr(Partition, layout)(boundaries([300, 0, 150, 5]), 3)
    problem = problem_of(partition, heads=3, value_heads=6)
    expected = attention(problem, partition, KcpOptions(exchange="all_gather", backward="saved"))
    group_bytes = 2 * tile_bytes_per_head(ParallelPlan(partition).most_chunks, 64, 4, states=2, values=2)
    for exchange, backward, limit, hide_bytes in (
        ("spread", "saved", None, passes.HIDE_BYTES),
        ("relay", "saved", None, passes.HIDE_BYTES),
        ("all_gather", "replay", None, 1),  # an exchange is cut in two
        ("spread", "replay", group_bytes, 1),
        ("relay", "replay", 2 * group_bytes, 1),
        ("relay", "saved", group_bytes, 1),
        ("all_gather", "saved", 2 * group_bytes, 1),
    ):
        monkeypatch.setattr(passes, "HIDE_BYTES", hide_bytes)
        options = KcpOptions(exchange=exchange, backward=backward, workspace_limit=limit)
        found = attention(problem, partition, options)
        for mine, yours in zip(found.ranks, expected.ranks):
            assert_same_bits(mine, yours)


@pytest.mark.parametrize("cut", ["no spans", "all spans"])
@pytest.mark.parametrize("limit", [None, 800_000])
def test_kept_decayed_q_and_k_change_no_bit(limit, cut, nan_poison, monkeypatch):
    """A limit of about a group of heads; the last rank holds no token."""
    monkeypatch.setattr(tables, "segment_rule", lambda *_: SegmentRule(64, 65 if cut == "all spans" else 10**6))
    partition = Partition.from_fragments([0, 150, 200], [(0, 0, 90), (1, 90, 200)], 3)
    problem = problem_of(partition, heads=2, value_heads=4)
    expected = attention(problem, partition)
    found = attention(problem, partition, KcpOptions(keep_decayed_qk=True, workspace_limit=limit))
    for mine, yours in zip(found.ranks, expected.ranks):
        assert_same_bits(mine, yours)


def test_one_rank_has_the_bits_of_one_device(nan_poison):
    partition = Partition.zigzag(boundaries(PACK), 1)
    problem = problem_of(partition)
    expected = problems.run(chunk_kda, problem, output_final_state=True)
    assert_same_bits(attention(problem, partition).whole, expected)


def test_whole_documents_have_the_bits_of_one_device(nan_poison):
    """Documents that no rank shares are computed as on one device, whatever the others do."""
    partition = Partition.from_fragments(
        boundaries([70, 200, 90]), [(2, 270, 360), (0, 0, 70), (1, 70, 170), (2, 170, 270)]
    )
    problem = problem_of(partition)
    expected = problems.run(chunk_kda, problem, output_final_state=True)
    found = attention(problem, partition).whole
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        for whole in (slice(0, 70), slice(270, 360)):
            assert torch.equal(found[name][:, whole], expected[name][:, whole]), name
    for name in ("final_state", "dinitial_state"):
        assert torch.equal(found[name][[0, 2]], expected[name][[0, 2]]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_have_the_same_bits(layout, nan_poison):
    partition = getattr(Partition, layout)(boundaries(PACK), 3)
    problem = problem_of(partition)
    first, *others = (attention(problem, partition) for _ in range(3))
    for other in others:
        for mine, yours in zip(first.ranks, other.ranks):
            assert_same_bits(mine, yours)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_document_changes_every_other_by_exactly_0(layout, nan_poison):
    partition = getattr(Partition, layout)(boundaries([90, 0, 150, 70]), 4)
    problem = problem_of(partition)
    before = attention(problem, partition).whole
    for name, tensor in problem.inputs.items():
        tensor[:, 90:240] = make_problem([150], seed=5).inputs[name]
    problem.keywords["initial_state"][2] += 1.0
    after = attention(problem, partition).whole
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        for other in (slice(0, 90), slice(240, 310)):
            assert torch.equal(before[name][:, other], after[name][:, other]), name
        assert not torch.equal(before[name][:, 90:240], after[name][:, 90:240]), name
    for name in ("final_state", "dinitial_state"):
        assert torch.equal(before[name][[0, 1, 3]], after[name][[0, 1, 3]]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_error_at_8_ranks_is_at_most_1_2_times_that_of_one(layout, dtype, nan_poison):
    lengths = (700, 33, 500)
    problem = make_problem(lengths, dtype=dtype, regime="softplus")
    expected = problems.reference(problem)
    one = problems.run(chunk_kda, problem, output_final_state=True)
    eight = attention(problem, getattr(Partition, layout)(boundaries(lengths), 8)).whole
    for name, tensor in expected.items():
        errors = [problems.relative_error(found[name], tensor) for found in (eight, one)]
        # What stays fp32 may lose an ulp, 1.2e-7, in each of up to 14 steps of a walk, which truncates as tensor cores
        # do: a thousandth of the budgets. The parameters' sums cancel, hence a little more.
        floor = 1e-5 if name in ("dA_log", "ddt_bias") else 14 * 1.2e-7
        assert errors[0] <= max(1.2 * errors[1], floor), (name, *errors)


def test_rows_of_states_belong_to_the_ranks_with_the_ends(nan_poison):
    partition = Partition.contiguous(boundaries([100, 0, 100]), 3)
    problem = problem_of(partition)
    # Rows of an initial state that a rank does not own are not read.
    state = problem.keywords["initial_state"]

    def call(ctx):
        own = state.clone()
        own[[n for n in range(3) if n not in ctx.owned_first]] = torch.nan
        leaves = {"initial_state": own.requires_grad_()}
        inputs = [partition.shard(problem.inputs[name], ctx.rank) for name in NAMES]
        keywords = problem.keywords | leaves
        o, final_state = chunk_kda(*inputs, cp_context=ctx, output_final_state=True, **keywords)
        (o.float().sum() + final_state.square().sum()).backward()
        return {"o": o.detach(), "final_state": final_state.detach(), "dinitial_state": leaves["initial_state"].grad}

    found = run_ranks(partition, call)
    ctx = KcpContext(partition, VirtualGroup(3))
    assert [ctx.of_rank(rank).owned_first for rank in range(3)] == [(0, 1), (2,), ()]
    assert [ctx.of_rank(rank).owned_last for rank in range(3)] == [(1,), (0,), (2,)]
    for rank, one in enumerate(found.ranks):
        assert all(torch.isfinite(tensor).all() for tensor in one.values())
        owner = ctx.of_rank(rank)
        for name, owned in (("final_state", owner.owned_last), ("dinitial_state", owner.owned_first)):
            for document in range(3):
                assert bool(one[name][document].any()) == (document in owned), (rank, name, document)
    assert torch.equal(found.ranks[0]["final_state"][1], state[1]), "an empty document returns its initial state"


def test_without_states_and_with_transposed_ones(nan_poison):
    partition = Partition.zigzag(boundaries([90, 140]), 2)
    problem = problem_of(partition, with_state=False)
    expected = problems.reference(problem)
    assert_within_budgets(attention(problem, partition).whole, expected, problem, "bounded")
    problem = problem_of(partition)
    problem.keywords |= {"allow_neg_eigval": True, "scale": 0.3, "state_v_first": True}
    expected = problems.reference(problem)
    assert_within_budgets(attention(problem, partition).whole, expected, problem, "bounded")


def test_gradients_of_one_output_alone(nan_poison):
    """Without a gradient of the final states, or without one of o: the other ranks' part arrives all the same."""
    partition = Partition.contiguous(boundaries([150]), 3)
    problem = problem_of(partition)

    def call(parts, run):
        def one(ctx):
            leaf = (
                partition.shard(problem.inputs["v"], ctx.rank) if ctx else problem.inputs["v"].clone()
            ).requires_grad_()
            inputs = {n: partition.shard(t, ctx.rank) if ctx else t for n, t in problem.inputs.items()} | {"v": leaf}
            o, final_state = chunk_kda(
                **inputs, **problem.keywords, output_final_state=True, **({"cp_context": ctx} if ctx else {})
            )
            loss = o.float().square().sum() if parts == "o" else final_state.square().sum()
            loss.backward()
            return {"dv": leaf.grad}

        return run(one)

    for parts in ("o", "final_state"):
        found = call(parts, lambda one: run_ranks(partition, one).whole)
        expected = call(parts, lambda one: one(None))
        # both are bf16 roundings of nearly the same fp32 numbers
        assert problems.relative_error(found["dv"], expected["dv"].double()) <= 4e-3, parts


def test_no_gradient_keeps_nothing_and_exchanges_once(nan_poison):
    partition = Partition.contiguous(boundaries([150, 90]), 3)
    problem = problem_of(partition)

    def call(ctx):
        with torch.no_grad():
            inputs = [partition.shard(problem.inputs[name], ctx.rank) for name in NAMES]
            o, final_state = chunk_kda(*inputs, cp_context=ctx, **problem.keywords)
        assert final_state is None
        return {"o": o}

    expected, _ = chunk_kda(*problem.inputs.values(), cu_seqlens=problem.cu_seqlens, **problem.keywords)
    assert problems.relative_error(run_ranks(partition, call).whole["o"], expected.double()) <= 4e-3


@pytest.mark.parametrize("backward", ["saved", "replay"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_bytes_received_are_those_of_the_plan(exchange, backward):
    """A backward exchanges gradients of states and nothing else: a replay recomputes from what was kept."""
    partition = Partition.per_document_zigzag(boundaries([150, 90]), 3)
    problem = problem_of(partition)
    ctx = KcpContext(partition, VirtualGroup(3), options=KcpOptions(exchange=exchange, backward=backward))

    def fn(rank, own):
        inputs = [partition.shard(problem.inputs[name], rank).requires_grad_() for name in NAMES]
        o, _ = chunk_kda(*inputs, cp_context=own, **problem.keywords)
        forward = own.channel.received_bytes
        o.float().sum().backward()
        return forward, own.channel.received_bytes - forward

    received = run_virtual(ctx, fn).results
    for way, backward in enumerate((False, True)):
        expected = ctx.parallel_plan.traffic(exchange, 2, backward).received
        assert tuple(both[way] for both in received) == tuple(4 * 64 * 64 * count for count in expected)


def test_a_named_walk_is_what_runs():
    partition = Partition.contiguous(boundaries([200]), 4)
    problem = problem_of(partition)
    options = KcpOptions(transfer_walk="tf32_hilo", exchange="all_gather")

    def fn(rank, own):
        inputs = [partition.shard(problem.inputs[name], rank) for name in NAMES]
        chunk_kda(*inputs, cp_context=own, **problem.keywords)
        return [one.variant for one in last_launches() if one.program == "transfer_walk"]

    walks = run_virtual(KcpContext(partition, VirtualGroup(4), options=options), fn).results
    assert walks == [[], [], ["tf32_hilo"], ["tf32_hilo"]], "ranks 0 and 1 have nothing to walk over"


def test_times_are_reported_for_each_rank():
    partition = Partition.contiguous(boundaries([200]), 2)
    seconds = attention(problem_of(partition), partition).seconds
    assert len(seconds) == 2 and all(0 < one < 60 for one in seconds)


def context(partition=None, **more) -> KcpContext:
    partition = partition or Partition.contiguous([0, 20], 1)
    return KcpContext(partition, VirtualGroup(partition.world_size), **more)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"cu_seqlens": torch.tensor([0, 20])}, UnsupportedProblemError, "cu_seqlens is given beside cp_context"),
        ({"options": KdaOptions()}, UnsupportedProblemError, "options is given beside cp_context"),
        ({"initial_state": torch.zeros(2, 2, 64, 64)}, UnsupportedProblemError, "initial_state has shape"),
        ({"g": torch.zeros(1, 20, 2)}, UnsupportedProblemError, "g has shape"),
    ],
)
def test_wrong_calls_are_refused_before_any_exchange(change, error, message):
    ctx = context().of_rank(0)
    arguments = dict(make_problem((20,), with_state=False).inputs) | {"cp_context": ctx} | change
    with pytest.raises(error, match=message):
        chunk_kda(**arguments)
    assert ctx.channel.num_exchanges == 0


def test_tensors_of_other_tokens_or_another_problem_are_refused():
    ctx = context()
    problem, other = make_problem((20,), with_state=False), make_problem((20,), with_state=False, heads=4)

    def fn(rank, own):
        with pytest.raises(PlanMismatchError, match="q has 21 tokens; rank 0 of this partition holds 20"):
            chunk_kda(**make_problem((21,), with_state=False).inputs, cp_context=own)
        chunk_kda(**problem.inputs, cp_context=own)
        with pytest.raises(PlanMismatchError, match=r"\('bf16', 4, 4, 64, 'cpu'\); the context's first call had"):
            chunk_kda(**other.inputs, cp_context=own)

    run_virtual(ctx, fn)


def test_wrong_contexts_are_refused():
    partition = Partition.contiguous([0, 20], 2)
    for arguments, message in (
        (([0, 20], VirtualGroup(1)), "partition is list"),
        ((partition, VirtualGroup(3)), "the partition is for 2 ranks, the group has 3"),
        ((partition, 7), "torch.distributed is not initialized"),
    ):
        with pytest.raises(UnsupportedProblemError, match=message):
            KcpContext(*arguments)
    for options, message in (
        (KdaOptions(), r"options is KdaOptions; give KcpOptions\(...\)"),
        (KcpOptions(exchange="ring"), "exchange='ring'"),
        (KcpOptions(exchange=np.array(["relay", "spread"])), r"exchange=array\(\['relay', 'spread'\]"),
        (KcpOptions(backward="none"), "backward='none'"),
        (KcpOptions(backward="replay", keep_decayed_qk=True), "keep_decayed_qk=True beside backward='replay'"),
        (KcpOptions(transfer_walk="fp8"), "transfer walk 'fp8'"),
        (
            KcpOptions(transfer_walk="bf16x3", precision_mode=1),
            "precision_mode=1 belongs to tf32_hilo, not to 'bf16x3'",
        ),
    ):
        with pytest.raises(UnsupportedProblemError, match=message):
            KcpContext(partition, VirtualGroup(2), options=options)
    for timeout in (0, None, "1", float("inf")):
        with pytest.raises(UnsupportedProblemError, match=f"timeout={timeout!r}; give a positive number of seconds"):
            KcpContext(partition, VirtualGroup(2), timeout=timeout)
    problem = make_problem((10,), with_state=False)
    with pytest.raises(UnsupportedProblemError, match="call through run_virtual"):
        chunk_kda(**problem.inputs, cp_context=KcpContext(partition, VirtualGroup(2)))


def test_options_are_resolved_once(monkeypatch):
    monkeypatch.setenv("CAKE_KDA_JIT_TRANSFER_WALK", "bf16x3")
    monkeypatch.setenv("CAKE_KDA_JIT_BACKWARD", "replay")
    options = context().options
    assert (options.transfer_walk, options.backward, options.checkpoint_tokens) == ("bf16x3", "replay", 512)
    with pytest.raises(UnsupportedProblemError, match="precision_mode=2 belongs to tf32_hilo, not to 'bf16x3'"):
        context(options=KcpOptions(precision_mode=2))
    monkeypatch.delenv("CAKE_KDA_JIT_TRANSFER_WALK")
    assert context().options.transfer_walk == "default", "nobody named a walk: its width follows the shape"
    assert context(options=KcpOptions(precision_mode=2)).options.transfer_walk == "tf32_hilo"
    assert replace(options, transfer_walk="tf32_hilo").resolved().transfer_walk == "tf32_hilo"
