"""Attention cases from public reports: equalities to the bit. docs/cases-attention.md names each test's report."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit import KdaOptions, chunk_kda, make_plan
from cake_kda_jit.bench.problems import NAMES, REGIMES, Problem, make_problem, relative_error, run
from cake_kda_jit.ops.forward import CONTEXT_NAMES

from .attention import assert_same_bits, call, part_of, ready_problem

pytestmark = pytest.mark.usefixtures("nan_poison")


# ---- causality -------------------------------------------------------------------------------------------------------

FUTURES = {
    "noise": lambda tensor, name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(11)).abs_(),
    "large": lambda tensor, name: torch.full(tensor.shape, 1e3),
    "zero": lambda tensor, name: torch.zeros(tensor.shape),
    "reset": lambda tensor, name: torch.full(tensor.shape, -torch.inf) if name == "g" else tensor.clone(),
}


def with_future(problem: Problem, prefix: int, future: str) -> Problem:
    """The problem with every input replaced from token ``prefix`` on; a gate stays at most 0."""
    inputs = {}
    for name, tensor in problem.inputs.items():
        inputs[name] = tensor.clone()
        later = FUTURES[future](tensor[:, prefix:], name)
        inputs[name][:, prefix:] = -later.abs() if name == "g" else later
    return Problem(inputs, problem.keywords, problem.cu_seqlens)


def prefix_loss(prefix: int):
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(1, 400, 8, 128, generator=generator)

    def loss(o, final_state):
        return (o[:, :prefix].float() * weights[:, :prefix, : o.shape[2], : o.shape[3]]).sum()

    return loss


def assert_prefix_equal(found, expected, prefix: int) -> None:
    """o and the inputs' gradients before the prefix's end, and the whole gradients of state and parameters."""
    for name, tensor in expected.items():
        if name == "final_state":
            continue
        if name in ("o", *("d" + n for n in NAMES)):
            assert torch.equal(found[name][:, :prefix], tensor[:, :prefix]), name
            if name != "o":
                assert not found[name][:, prefix:].any(), f"{name} behind the loss"
        else:
            assert torch.equal(found[name], tensor), name


# The report's shape, then prefixes that end at, before and behind the ends of chunks and of segments of 64 and 128.
CAUSAL = [
    *[(22, 21, None), (200, 1, None), (200, 64, None), (200, 65, None)],
    *[(200, 127, 64), (200, 128, 64), (300, 190, 128)],
]


@pytest.mark.parametrize("future", FUTURES)
@pytest.mark.parametrize("tokens, prefix, segment_tokens", CAUSAL)
def test_later_tokens_change_nothing_earlier(tokens, prefix, segment_tokens, future):
    problem = ready_problem((tokens,), gate=(-0.8, -0.6), beta=1.0, heads=4, dtype=torch.bfloat16)
    expected = call(problem, prefix_loss(prefix), segment_tokens)
    found = call(with_future(problem, prefix, future), prefix_loss(prefix), segment_tokens)
    assert_prefix_equal(found, expected, prefix)


@pytest.mark.parametrize("prefix, segment_tokens", [(21, None), (100, None), (150, 64), (192, 64)])
def test_later_nan_reaches_no_earlier_output(prefix, segment_tokens):
    problem = ready_problem((200,), gate=(-0.8, -0.6), beta=1.0)
    inputs = {name: tensor.clone() for name, tensor in problem.inputs.items()}
    for tensor in inputs.values():
        tensor[:, prefix:] = torch.nan
    expected = call(problem, prefix_loss(prefix), segment_tokens)
    found = call(Problem(inputs, problem.keywords, problem.cu_seqlens), prefix_loss(prefix), segment_tokens)
    assert torch.equal(found["o"][:, :prefix], expected["o"][:, :prefix])


@pytest.mark.parametrize("regime", ["ready", *REGIMES])
@pytest.mark.parametrize(
    "prefix, tokens, segment_tokens",
    [(21, 22, None), (21, 200, None), (63, 64, None), (64, 65, None), (64, 65, 64), (100, 128, 64), (128, 300, 128)],
)
def test_appended_tokens_change_nothing_earlier(prefix, tokens, segment_tokens, regime):
    if regime == "ready":
        problem = ready_problem((tokens,), gate=(-0.8, -0.6), beta=1.0, heads=4, dtype=torch.bfloat16)
    else:
        problem = make_problem((tokens,), regime=regime)
    short = call(part_of(problem, 0, prefix), prefix_loss(prefix), segment_tokens)
    long = call(problem, prefix_loss(prefix), segment_tokens)
    assert_prefix_equal(long, short, prefix)


def test_a_document_that_outgrows_one_segment_changes_by_rounding_only():
    """By the default rule 8,192 tokens are four segments and 8,191 are one; a plan's segment_tokens keeps every bit."""
    problem = make_problem((8192,), heads=1, regime="weak", dtype=torch.float32)
    short = part_of(problem, 0, 8191)
    o, less = (chunk_kda(*one.inputs.values(), **one.keywords)[0][:, :8191] for one in (problem, short))
    assert torch.equal(o[:, :2048], less[:, :2048])
    # three steps of the walk: fp32 sums in another order, and what its truncation loses
    assert 0 < relative_error(o[:, 2048:], less[:, 2048:].double()) < 2e-6
    plans = (
        make_plan(one.cu_seqlens, num_heads=1, head_dim=64, device="cpu", segment_tokens=1024)
        for one in (problem, short)
    )
    o, less = (
        chunk_kda(*one.inputs.values(), plan=plan, **one.keywords)[0][:, :8191]
        for one, plan in zip((problem, short), plans)
    )
    assert torch.equal(o, less)


# ---- repeats, neighbours, modes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward, segment_tokens", [("saved", 0), ("replay", 0), ("saved", 64), ("replay", 64)])
def test_30_repeats_in_poisoned_memory_give_identical_bytes(backward, segment_tokens):
    """Every element is written, and with the same bytes."""
    problem = make_problem((70, 0, 1, 150), heads=1, value_heads=2)
    loss = prefix_loss(221)
    options = KdaOptions(backward=backward, checkpoint_tokens=64)

    def state_loss(o, final_state):
        return loss(o, final_state) + final_state.square().sum()

    torch.set_num_threads(2)  # the fixture sets it back
    first = None
    for _ in range(30):
        again = {n: bytes_of(t) for n, t in call(problem, state_loss, segment_tokens, options=options).items()}
        first = first or again
        for name, expected in first.items():
            assert again[name] == expected, name


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The tensor's memory: unlike ``torch.equal``, this tells -0 from 0 and compares NaN."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("regime", ["ready", *REGIMES])
@pytest.mark.parametrize("checkpoint_tokens", [64, 192])
def test_saved_and_replayed_backwards_have_equal_bits(regime, checkpoint_tokens):
    lengths = (130, 1, 0, 400)
    if regime == "ready":  # with hard resets, behind which nothing may be recomputed from
        problem = ready_problem(lengths, gate=(-2.0, 0.0), heads=1, value_heads=2)
        problem.inputs["g"][:, 100:300:50] = -torch.inf
    else:
        problem = make_problem(lengths, regime=regime, heads=1, value_heads=2)
    results = []
    for options in (KdaOptions(backward="saved"), KdaOptions(backward="replay", checkpoint_tokens=checkpoint_tokens)):
        results.append(run(chunk_kda, problem, output_final_state=True, options=options))
        assert all(torch.isfinite(tensor).all() for tensor in results[-1].values())
    assert_same_bits(*results)


# ---- offsets past 2^31 -----------------------------------------------------------------------------------------------

TAIL = 70  # tokens of the last document


def virtual(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    """Memory of which only what is touched becomes real; skips where the system grants none."""
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"no {torch.Size(shape).numel() * 2} bytes of address space: {error}")


@pytest.fixture
def lazy_memory():
    """Fresh memory is left alone: filling 4 GB with NaN would make it real."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = True


def table_of_last_document(start: int, head_dim: int):
    """A plan's tables that hold one document, at token ``start`` of the pack: nothing before it is read."""
    plan = make_plan(torch.tensor([0, TAIL]), num_heads=1, head_dim=head_dim, device="cpu", segment_tokens=0)
    chunks = plan.chunk_table.clone()
    assert chunks[:, 1].tolist() == [0, 64], "the second column is a chunk's first token"
    chunks[:, 1] += start
    return chunks, plan.segment_table, plan.summary_offsets, plan.num_summaries


def test_offsets_past_2_to_the_31(lazy_memory):
    """T H K above 2^31: the last document of a pack has the bits of its own run, forward and backward.

    17 million tokens of which only the last 70 exist: the tables name no others, so no other page is touched.
    """
    problem = make_problem((TAIL,), heads=1, head_dim=128)
    start = 2**24 + 3
    wide = {}
    for name, tensor in problem.inputs.items():
        wide[name] = virtual(start + TAIL, *tensor.shape[2:])
        wide[name][start:] = tensor[0]
        wide[name].requires_grad_()
    keywords = problem.keywords
    optional = (keywords["A_log"], keywords["dt_bias"].view(1, 128), keywords["initial_state"])
    transforms = (128**-0.5, -5.0, True, "bounded", "sigmoid")
    arguments = (*wide.values(), *optional, *table_of_last_document(start, 128), False, *transforms)
    o, final_state, *context = torch.ops.cake_kda_jit.chunk_kda_forward(
        *arguments, "replay", 64, None, None, False, True, True
    )
    expected = call(problem, lambda o, state: o.float().sum() + state.sum(), options=KdaOptions(backward="replay"))
    assert torch.equal(o.detach()[start:], expected["o"][0]) and torch.equal(final_state, expected["final_state"])
    do = torch.ones((), dtype=torch.bfloat16).expand(o.shape)
    kept = dict(zip(("Tinv", "checkpoints"), context, strict=True))
    gradients = torch.ops.cake_kda_jit.chunk_kda_backward(
        do, torch.ones_like(final_state), *map(kept.get, CONTEXT_NAMES), *arguments, "replay", 64, None, None, False
    )
    for name, gradient in zip(NAMES, gradients):
        assert torch.equal(gradient[start:], expected["d" + name][0]), name
    assert torch.equal(gradients[7], expected["dinitial_state"])


def test_strides_that_reach_past_2_to_the_31(lazy_memory):
    """A small pack whose rows lie 2^25 elements apart: token 69 of a view starts behind element 2^31."""
    problem = make_problem((TAIL,), heads=1, head_dim=64)
    expected = call(problem, lambda o, state: o.float().sum())
    stride = 2**25
    leaves, views = {}, []
    for name, tensor in problem.inputs.items():
        rows = virtual(stride * (TAIL - 1) + 64)
        view = torch.as_strided(rows, tensor.shape, (0, stride, *(64, 1)[: tensor.dim() - 2]))
        view.copy_(tensor)
        leaves[name] = view.detach().requires_grad_()
        views.append(leaves[name])
        assert view[:, -1].storage_offset() > 2**31
    o, _ = chunk_kda(*views, cu_seqlens=problem.cu_seqlens, **problem.keywords)
    assert torch.equal(o, expected["o"])
    gradients = torch.autograd.grad(o.float().sum(), views)
    for name, gradient in zip(NAMES, gradients):
        assert torch.equal(gradient, expected["d" + name]), name
