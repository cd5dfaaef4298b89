"""Capacity plans: one plan for every pack up to its maxima, with the bits of plans of exact size and zeros behind."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cake_kda_jit import KdaOptions, PlanMismatchError, UnsupportedProblemError, causal_conv1d, chunk_kda, make_plan
from cake_kda_jit.bench.problems import NAMES, Problem, make_problem, run
from cake_kda_jit.ops.select import SegmentRule
from cake_kda_jit.ops.tables import most_rows, rows_of_lengths

HEADS, HEAD_DIM = 2, 64
MAX_DOCUMENTS, MAX_TOKENS = 5, 300
PACKS = [(300,), (65, 0, 1, 200), (0, 0), (64, 64, 64, 64, 44), (1, 2, 3, 4, 5), (130,)]


def plan_of(lengths, **options):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return make_plan(cu_seqlens, num_heads=HEADS, head_dim=HEAD_DIM, device="cpu", **options)


def capacity_plan(lengths, **options):
    return plan_of(lengths, max_documents=MAX_DOCUMENTS, max_tokens=MAX_TOKENS, **options)


def padded(problem: Problem, fill: float) -> Problem:
    """The problem in tensors of the capacity's size; rows behind the pack hold ``fill``."""
    inputs = {}
    for name, tensor in problem.inputs.items():
        inputs[name] = tensor.new_full((1, MAX_TOKENS, *tensor.shape[2:]), fill)
        inputs[name][:, : tensor.shape[1]] = tensor
    keywords = dict(problem.keywords)
    if "initial_state" in keywords:
        state = keywords["initial_state"]
        keywords["initial_state"] = torch.cat(
            [state, state.new_zeros(MAX_DOCUMENTS - state.shape[0], *state.shape[1:])]
        )
    return Problem(inputs, keywords)


def run_with(problem: Problem, plan, do: torch.Tensor, dfinal_state: torch.Tensor, **extra) -> dict[str, torch.Tensor]:
    """Outputs and gradients; do and dfinal_state are cut or filled with NaN and zeros to the outputs' sizes."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in problem.leaves().items()}
    keywords = {**problem.keywords, **{n: t for n, t in leaves.items() if n not in NAMES}, **extra}
    o, final_state = chunk_kda(*(leaves[n] for n in NAMES), plan=plan, output_final_state=True, **keywords)
    padded_do = torch.full(o.shape, torch.nan, dtype=o.dtype)
    padded_do[:, : do.shape[1]] = do
    padded_dfinal = torch.zeros(final_state.shape)
    padded_dfinal[: dfinal_state.shape[0]] = dfinal_state
    torch.autograd.backward([o, final_state], [padded_do, padded_dfinal])
    found = {"o": o.detach(), "final_state": final_state.detach()}
    return found | {"d" + name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("segment_tokens", [None, 64])
@pytest.mark.parametrize("backward, keep_decayed_qk", [("saved", False), ("saved", True), ("replay", False)])
def test_every_pack_has_the_bits_of_an_exact_plan(backward, keep_decayed_qk, segment_tokens, nan_poison):
    """One plan, updated from pack to pack; NaN in all rows behind a pack reaches nothing."""
    plan = capacity_plan(PACKS[0], segment_tokens=segment_tokens)
    options = KdaOptions(backward, checkpoint_tokens=64, keep_decayed_qk=keep_decayed_qk)
    for lengths in PACKS:
        tokens, documents = sum(lengths), len(lengths)
        problem = make_problem(lengths, heads=HEADS, head_dim=HEAD_DIM)
        generator = torch.Generator().manual_seed(1)
        do = torch.randn(1, tokens, HEADS, HEAD_DIM, generator=generator).to(torch.bfloat16)
        dfinal_state = torch.randn(documents, HEADS, HEAD_DIM, HEAD_DIM, generator=generator)
        exact = plan_of(lengths, segment_tokens=segment_tokens)
        expected = run_with(problem, exact, do, dfinal_state, options=options)
        plan.update(exact.cu_seqlens)
        found = run_with(padded(problem, torch.nan), plan, do, dfinal_state, options=options)
        for name, tensor in found.items():
            rows = tokens if name in ("o", *("d" + n for n in NAMES)) else documents
            if name in ("dA_log", "ddt_bias"):
                assert torch.equal(tensor, expected[name]), (lengths, name)
                continue
            own, rest = (tensor[0, :rows], tensor[0, rows:]) if rows == tokens else (tensor[:rows], tensor[rows:])
            wanted = expected[name][0] if rows == tokens else expected[name]
            assert torch.equal(own, wanted), (lengths, name)
            assert (rest == 0).all(), (lengths, name)


@pytest.mark.parametrize("lengths", PACKS)
def test_convolution(lengths, nan_poison):
    tokens, documents = sum(lengths), len(lengths)
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.full((1, MAX_TOKENS, 8), torch.nan) for _ in range(2))
    x[:, :tokens], dy[:, :tokens] = (torch.randn(1, tokens, 8, generator=generator) for _ in range(2))
    weight = torch.randn(8, 4, generator=generator)
    state = torch.randn(MAX_DOCUMENTS, 8, 3, generator=generator)

    def results(x, state, dy, plan):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, state)]
        y, final = causal_conv1d(*leaves[:2], initial_state=leaves[2], output_final_state=True, plan=plan)
        torch.autograd.backward([y, final], [dy, torch.ones_like(final)])
        return [y.detach(), final.detach(), *(leaf.grad for leaf in leaves)]

    y, final, dx, dweight, dstate = results(x, state, dy, capacity_plan(lengths))
    expected = results(x[:, :tokens], state[:documents], dy[:, :tokens], plan_of(lengths))
    found = (y[:, :tokens], final[:documents], dx[:, :tokens], dweight, dstate[:documents])
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
    assert (y[:, tokens:] == 0).all() and (dx[:, tokens:] == 0).all()
    assert torch.equal(final[documents:], state[documents:]) and (dstate[documents:] == 1).all()


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 700), max_size=8),
    segment_chunks=st.integers(0, 3),
    minimum=st.integers(1, 600),
    most_segments=st.integers(0, 4),
    spare_documents=st.integers(0, 2),
    spare_tokens=st.integers(0, 200),
)
def test_most_rows_suffice(lengths, segment_chunks, minimum, most_segments, spare_documents, spare_tokens):
    rule = SegmentRule(64 * segment_chunks, minimum, most_segments)
    needed = rows_of_lengths(lengths, rule, False)
    most = most_rows(len(lengths) + spare_documents, sum(lengths) + spare_tokens, rule)
    assert all(one <= other for one, other in zip(needed, most))


def test_most_rows_are_reached():
    """Where every document adds one token to whole chunks or segments, no row is spare."""
    for documents, chunks in itertools.product((1, 3), (1, 4)):
        lengths = [64 * chunks - 63] * documents
        for rule in (SegmentRule(0, 0), SegmentRule(64, 65)):
            assert rows_of_lengths(lengths, rule, False).chunks == most_rows(documents, sum(lengths), rule).chunks


def test_a_capacity_plan_is_one_object():
    plan, twin = capacity_plan((10,)), capacity_plan((10,))
    assert plan == plan and plan != twin and len({plan, twin}) == 2
    assert (plan.num_documents, plan.num_tokens, plan.boundaries) == (MAX_DOCUMENTS, MAX_TOKENS, None)
    for other in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert torch.equal(other.chunk_table, plan.chunk_table)
        other.update(torch.tensor([0, 3, 9], dtype=torch.int32))
        assert other.cu_seqlens.tolist() == [0, 3, 9, 9, 9, 9]
    assert plan.cu_seqlens.tolist() == [0, 10, 10, 10, 10, 10], "copies have tables of their own"


def test_an_update_keeps_addresses():
    plan = capacity_plan((10,))
    addresses = [getattr(plan, n).data_ptr() for n in ("cu_seqlens", "chunk_table", "segment_table", "summary_offsets")]
    plan.update(torch.tensor([0, 100, 300]))
    assert addresses == [
        getattr(plan, n).data_ptr() for n in ("cu_seqlens", "chunk_table", "segment_table", "summary_offsets")
    ]
    assert plan.chunk_table[:, 0].tolist() == [0, 0, 1, 1, 1, 1] + [-1] * (plan.num_chunks - 6)


def test_a_backward_after_an_update_is_an_error():
    problem = padded(make_problem((100,), heads=HEADS, with_state=False), 0.0)
    plan = capacity_plan((100,))
    q = problem.inputs["q"].requires_grad_()
    o, _ = chunk_kda(*problem.inputs.values(), plan=plan, **problem.keywords)
    plan.update(torch.tensor([0, 50]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
    assert q.grad is None


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0, 301], "ends at 301; this plan holds 300 tokens"),
        ([0, 1, 2, 3, 4, 5, 6], "has 7 entries; this plan holds 1 to 6"),
        ([], "has 0 entries"),
        ([0, 9, 5], "is below"),
        ([1, 5], "starts with 1"),
        ([0.0, 5.0], "torch.float32"),
    ],
)
def test_what_is_no_pack_of_the_capacity_is_refused_and_changes_nothing(boundaries, message):
    plan = capacity_plan((7, 5))
    dtype = None if boundaries else torch.int64
    with pytest.raises(UnsupportedProblemError, match=message):
        plan.update(torch.tensor(boundaries, dtype=dtype))
    assert plan.cu_seqlens.tolist() == [0, 7, 12, 12, 12, 12]


def test_plans_of_one_pack_have_no_update():
    with pytest.raises(UnsupportedProblemError, match="give make_plan max_documents and max_tokens"):
        plan_of((5,)).update(torch.tensor([0, 5]))


@pytest.mark.parametrize("maxima", [{"max_documents": 3}, {"max_tokens": 9}, {"max_documents": 0, "max_tokens": 9}])
def test_both_maxima_are_needed(maxima):
    with pytest.raises(UnsupportedProblemError, match="needs both max_documents and max_tokens"):
        plan_of((5,), **maxima)


def test_boundaries_beside_a_capacity_plan():
    """Accepted with or without the empty documents at the end, refused if they are not the pack's."""
    plan = capacity_plan((7, 5))
    problem = padded(make_problem((7, 5), heads=HEADS, with_state=False), 0.0)

    def call(boundaries):
        return chunk_kda(*problem.inputs.values(), plan=plan, cu_seqlens=torch.tensor(boundaries), **problem.keywords)

    assert torch.equal(call([0, 7, 12])[0], call([0, 7, 12, 12, 12, 12])[0])
    for wrong in ([0, 12], [0, 7], [0, 7, 12, 13], [0, 7, 12, 12, 12, 12, 12]):
        with pytest.raises(PlanMismatchError):
            call(wrong)


def test_the_host_copy_is_used():
    cu_seqlens = torch.tensor([0, 7, 12])
    plan = make_plan(
        cu_seqlens,
        cu_seqlens_cpu=cu_seqlens.int(),
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        device="cpu",
        max_documents=MAX_DOCUMENTS,
        max_tokens=MAX_TOKENS,
    )
    assert plan.cu_seqlens.tolist() == [0, 7, 12, 12, 12, 12]


def test_run_and_plan_in_inference_mode():
    with torch.inference_mode():
        plan = capacity_plan((100, 30))
        plan.update(torch.tensor([0, 5]))
    problem = padded(make_problem((5,), heads=HEADS), 0.0)
    assert run(chunk_kda, problem, plan=plan, output_final_state=True)["dq"].isfinite().all()
