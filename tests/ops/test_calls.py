"""Prepared calls: when they are used, what a key holds, and that they give what the operators give, bit by bit."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cake_kda_jit import (
    KdaOptions,
    PlanMismatchError,
    UnsupportedProblemError,
    causal_conv1d,
    chunk_kda,
    last_launches,
    make_plan,
)
from cake_kda_jit.bench.problems import make_problem
from cake_kda_jit.layers import KimiDeltaAttention
from cake_kda_jit.ops import calls, keys

HEADS, HEAD_DIM, HIDDEN = 2, 64, 32
LENGTHS = (70, 0, 130)


@pytest.fixture(autouse=True)
def no_calls():
    """Each test begins with nothing prepared."""
    calls._calls.clear()


class Operators(TorchDispatchMode):
    """Every call of an operator of this package, by name; under a mode nothing prepared runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "cake_kda_jit":
            self.names.append(function.__name__.removesuffix(".default"))
        return function(*args, **(kwargs or {}))


def plan_of(lengths=LENGTHS, **options):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return make_plan(cu_seqlens, num_heads=HEADS, head_dim=HEAD_DIM, device="cpu", **options)


def run_all(problem, plan, **options) -> list[torch.Tensor]:
    """o, the final state and every gradient."""
    leaves = [tensor.clone().requires_grad_() for tensor in problem.inputs.values()]
    keywords = {
        name: value.clone().requires_grad_() if isinstance(value, torch.Tensor) else value
        for name, value in problem.keywords.items()
    }
    o, state = chunk_kda(*leaves, plan=plan, output_final_state=True, **keywords, **options)
    leaves += [value for value in keywords.values() if isinstance(value, torch.Tensor)]
    return [o, state, *torch.autograd.grad(o.float().square().sum() + state.square().sum(), leaves)]


def assert_equal(found, expected) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# ---- the same results ------------------------------------------------------------------------------------------------

# With a limit of one head's scratch each head is a block of its own, and all blocks share one place.
OPTIONS = {
    "saved": KdaOptions(),
    "replay": KdaOptions(backward="replay", checkpoint_tokens=64),
    "blocks": KdaOptions(workspace_limit=1_200_000),
    "decayed q and k": KdaOptions(keep_decayed_qk=True),
    "decayed q and k, blocks": KdaOptions(keep_decayed_qk=True, workspace_limit=300_000),
}


@pytest.mark.parametrize("segment_tokens", [None, 64])
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_has_the_operators_bits(name, segment_tokens, nan_poison):
    options, problem, plan = OPTIONS[name], make_problem(LENGTHS), plan_of(segment_tokens=segment_tokens)
    with Operators() as seen:
        expected = run_all(problem, plan, options=options)
    assert seen.names == ["chunk_kda_forward", "chunk_kda_backward"] and not calls._calls
    for _ in range(2):
        assert_equal(run_all(problem, plan, options=options), expected)
    assert len(calls._calls) == 1


@pytest.mark.parametrize("kind", ["plan", "capacity plan", "batch"])
def test_a_layer_has_the_operators_bits(kind, nan_poison):
    """Rows behind a capacity plan's pack are 0."""
    torch.manual_seed(0)
    layer, x = KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM), torch.randn(1, 256, HIDDEN)
    plan = {
        "plan": lambda: plan_of((70, 0, 186)),
        "capacity plan": lambda: plan_of((70, 0, 130), max_documents=4, max_tokens=256),
        "batch": lambda: None,
    }[kind]()
    if plan is None:
        x = x.view(2, 128, HIDDEN)

    def run() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_(), *layer.parameters()]
        o = layer(leaves[0], plan=plan)
        return [o, *torch.autograd.grad(o.square().sum(), leaves)]

    with Operators():
        expected = run()
    launched = []
    for _ in range(3):
        assert_equal(run(), expected)
        with torch.no_grad():
            assert torch.equal(layer(x, plan=plan), expected[0])
        launched.append([one.program for one in last_launches()])
    together = ["conv_forward", "chunk_prepare", "chunk_scan", "gated_norm_forward"]
    assert launched == [together] * 3


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_first_call_of_all_is_recomputed_alike(use_reentrant):
    """What the first forward saves is what the recomputation saves: the same nodes, whoever comes first."""
    torch.manual_seed(0)
    layer, x, plan = KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM), torch.randn(1, 200, HIDDEN), plan_of()
    found = []
    for call in (
        lambda leaf: checkpoint(lambda y: layer(y, plan=plan), leaf, use_reentrant=use_reentrant),
        lambda leaf: layer(leaf, plan=plan),
    ):
        leaf = x.clone().requires_grad_()
        call(leaf).square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_a_convolution_has_the_operators_bits(nan_poison):
    x, weight, bias = torch.randn(1, 200, 8), torch.randn(8, 4), torch.randn(8)
    state, dy = torch.randn(3, 8, 3), torch.randn(1, 200, 8)

    def run() -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias, state)]
        y, final = causal_conv1d(*leaves[:3], initial_state=leaves[3], output_final_state=True, plan=plan_of())
        return [y, final, *torch.autograd.grad([y, final], leaves, [dy, state])]

    with Operators():
        expected = run()
    for _ in range(2):
        assert_equal(run(), expected)


def test_outputs_that_nobody_uses_and_gradients_of_any_strides():
    problem, plan = make_problem(LENGTHS, with_state=False), plan_of()
    leaves = [tensor.clone().requires_grad_() for tensor in problem.inputs.values()]

    def gradients() -> list[torch.Tensor]:
        o, state = chunk_kda(*leaves, plan=plan, output_final_state=True, **problem.keywords)
        only_state = torch.autograd.grad(state.sum(), leaves[1:], retain_graph=True)
        expanded = torch.autograd.grad(o.sum(), leaves)
        return [*only_state, *expanded]

    with Operators():
        expected = gradients()
    assert_equal(gradients(), expected)


def test_saved_tensors_that_come_back_with_other_strides():
    """Kept on the host between forward and backward, they come back contiguous."""
    problem, plan = make_problem(LENGTHS, with_state=False), plan_of()
    leaves = [tensor.transpose(1, 2).contiguous().requires_grad_() for tensor in problem.inputs.values()]

    def gradients() -> list[torch.Tensor]:
        o, _ = chunk_kda(*(leaf.transpose(1, 2) for leaf in leaves), plan=plan, **problem.keywords)
        return torch.autograd.grad(o.float().square().sum(), leaves)

    expected = gradients()
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu():
            found = gradients()
        assert_equal(found, expected)


def test_a_batch(nan_poison):
    """Rows that can be counted as one are a prepared call; others are copied by the operator."""
    problem = make_problem(None, batch=(2, 70), with_state=False)
    plain = list(problem.inputs.values())
    strided = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in plain]
    with Operators():
        expected, _ = chunk_kda(*plain, **problem.keywords)
    for _ in range(2):
        assert torch.equal(chunk_kda(*plain, **problem.keywords)[0], expected)
    assert len(calls._calls) == 1
    assert torch.equal(chunk_kda(*strided, **problem.keywords)[0], expected)
    assert len(calls._calls) == 1


# ---- what a key holds ------------------------------------------------------------------------------------------------


def test_another_layout_plan_or_option_is_another_call(monkeypatch):
    problem, plan = make_problem(LENGTHS, with_state=False), plan_of()
    q, *others = problem.inputs.values()

    def call(q=q, plan=plan, **options) -> int:
        chunk_kda(q, *others, plan=plan, **{**problem.keywords, **options})
        return len(calls._calls)

    assert call() == call() == call(plan=plan_of((100, 10, 90))) == 1  # of as many chunks
    assert call(q=q.transpose(1, 2).contiguous().transpose(1, 2)) == 2
    assert call(plan=plan_of((100, 100))) == 3
    assert call(scale=0.5) == 4
    assert call(options=KdaOptions(backward="replay")) == 5
    assert call(options=KdaOptions(keep_decayed_qk=True)) == 6
    monkeypatch.setenv("CAKE_KDA_JIT_BACKWARD", "replay")
    assert call() == 7


def test_boundaries_beside_a_plan_are_compared_in_every_call():
    problem, plan, layer = (
        make_problem(LENGTHS, with_state=False),
        plan_of(),
        KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM),
    )
    x, right, wrong = torch.randn(1, 200, HIDDEN), torch.tensor([0, 70, 70, 200]), torch.tensor([0, 70, 71, 200])
    for _ in range(2):
        o, _ = chunk_kda(*problem.inputs.values(), plan=plan, cu_seqlens=right, **problem.keywords)
        assert torch.equal(o, chunk_kda(*problem.inputs.values(), plan=plan, **problem.keywords)[0])
        assert torch.equal(layer(x, plan=plan, cu_seqlens=right), layer(x, plan=plan))
        for call in (
            lambda: chunk_kda(*problem.inputs.values(), plan=plan, cu_seqlens=wrong, **problem.keywords),
            lambda: causal_conv1d(x, torch.ones(HIDDEN, 4), plan=plan, cu_seqlens=wrong),
            lambda: layer(x, plan=plan, cu_seqlens=wrong),
        ):
            with pytest.raises(PlanMismatchError, match="cu_seqlens differs"):
                call()


def test_the_environment_is_read_in_every_call(monkeypatch):
    problem, plan = make_problem(LENGTHS, with_state=False), plan_of()
    chunk_kda(*problem.inputs.values(), plan=plan, **problem.keywords)
    monkeypatch.setenv("CAKE_KDA_JIT_FAMILY", "smxx")
    with pytest.raises(UnsupportedProblemError, match="family 'smxx' cannot run"):
        chunk_kda(*problem.inputs.values(), plan=plan, **problem.keywords)


def test_a_prepared_call_hides_no_error():
    problem, plan = make_problem(LENGTHS, with_state=False), plan_of()
    inputs = dict(problem.inputs)
    chunk_kda(**inputs, plan=plan, **problem.keywords)
    for name, change, message in (
        ("k", lambda k: k.float(), "k is torch.float32"),
        ("v", lambda v: v[:, :-1], "v has shape"),
        ("beta", lambda beta: beta.to("meta"), "beta is on meta"),
        ("g", lambda g: [g], "g is list"),
        ("q", lambda q: None, "q is None"),
    ):
        with pytest.raises(UnsupportedProblemError, match=message):
            chunk_kda(**{**inputs, name: change(inputs[name])}, plan=plan, **problem.keywords)
    with pytest.raises(PlanMismatchError):
        chunk_kda(**inputs, plan=plan_of((70, 129)), **problem.keywords)


def test_a_scale_in_a_tensor_is_read_in_every_call():
    problem, plan, scale = make_problem(LENGTHS, with_state=False), plan_of(), torch.tensor(1.0)
    first, _ = chunk_kda(*problem.inputs.values(), plan=plan, scale=scale, **problem.keywords)
    scale.zero_()
    second, _ = chunk_kda(*problem.inputs.values(), plan=plan, scale=scale, **problem.keywords)
    assert first.abs().max() > 0 and second.abs().max() == 0


def test_the_oldest_call_goes_first(monkeypatch):
    monkeypatch.setattr(keys, "MOST_CALLS", 2)
    x, weight = torch.randn(1, 9, 8), torch.randn(8, 4)
    for width in (2, 3, 4, 3):
        causal_conv1d(x, weight[:, :width].contiguous())
    assert [key[2][1][1] for key in calls._calls] == [3, 4]


# ---- who sees what ---------------------------------------------------------------------------------------------------


def test_a_subclass_of_tensor_sees_operators():
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    weight = torch.randn(8, 4)
    for _ in range(2):
        y, _ = causal_conv1d(torch.randn(1, 9, 8).as_subclass(Watched), weight)
    assert isinstance(y, Watched) and sum("causal_conv1d_forward" in name for name in seen) >= 2


def test_a_profiler_shows_the_calls_by_name():
    problem, plan = make_problem(LENGTHS, with_state=False), plan_of()
    leaves = [tensor.clone().requires_grad_() for tensor in problem.inputs.values()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        chunk_kda(*leaves, plan=plan, **problem.keywords)[0].sum().backward()
    assert {"chunk_kda", "chunk_kdaBackward"} <= {event.key for event in profile.key_averages()}


def test_a_default_device_is_no_mode_of_ours():
    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    x, weight = torch.randn(1, 9, 8), torch.randn(8, 4)
    expected, _ = causal_conv1d(x, weight)
    for mode, number in ((torch.device("meta"), 1), (Functions(), 0)):
        calls._calls.clear()
        with mode:
            y, _ = causal_conv1d(x, weight, plan=None)
        assert torch.equal(y, expected) and len(calls._calls) == number


def test_a_traced_call_is_not_baked_in():
    x, weight = torch.randn(1, 9, 8), torch.randn(8, 4)
    causal_conv1d(x, weight)
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: causal_conv1d(x, weight)[0])(x)
    other = torch.randn(1, 9, 8)
    assert torch.equal(traced(other), causal_conv1d(other, weight)[0])


def test_hooks_of_projections_and_convolutions_run():
    layer, x, plan = KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM), torch.randn(1, 200, HIDDEN), plan_of()
    seen = []
    with torch.no_grad():
        expected = [layer(x, plan=plan) for _ in range(2)][-1]
        for name in ("q_proj", "k_conv1d", "o_proj"):
            layer.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
        assert torch.equal(layer(x, plan=plan), expected)
    assert seen == ["q_proj", "k_conv1d", "o_proj"]


def test_a_replaced_projection_runs():
    layer, x, plan = KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM), torch.randn(1, 200, HIDDEN), plan_of()
    with torch.no_grad():
        layer(x, plan=plan)
        layer.o_proj.forward = torch.zeros_like
        assert (layer(x, plan=plan) == 0).all()


def test_changed_in_place_between_forward_and_backward():
    problem, plan = make_problem(LENGTHS, with_state=False), plan_of((70, 0, 130), max_documents=3, max_tokens=200)
    leaves = [tensor.clone().requires_grad_() for tensor in problem.inputs.values()]
    for _ in range(2):
        o, _ = chunk_kda(*leaves, plan=plan, **problem.keywords)
    plan.update(torch.tensor([0, 20]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.float().sum().backward()


def test_a_step_imports_no_compiler():
    """Importing torch.compile's takes seconds where torch's files have no bytecode beside them."""
    code = (
        "import sys\n"
        "from cake_kda_jit.bench.first_step import STEPS\n"
        "for step in STEPS.values():\n"
        "    step('cpu')()\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout == "False\n"


def test_threads_share_a_call():
    problem, plan = make_problem(LENGTHS, with_state=False), plan_of()
    expected = run_all(problem, plan)
    wrong = []

    def work() -> None:
        for _ in range(5):
            found = run_all(problem, plan)
            wrong.extend(one for one, other in zip(found, expected, strict=True) if not torch.equal(one, other))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(calls._calls) == 1
