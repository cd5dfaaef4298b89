"""Living inside PyTorch on a CUDA device: graphs, capacity plans, compiled layers, no synchronisation, host time."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from cake_kda_jit import ColdCallInCapture, causal_conv1d, chunk_kda, fla, make_plan, registry
from cake_kda_jit.bench.host_graphs import GraphedLayer
from cake_kda_jit.bench.problems import NAMES, Problem, make_problem
from cake_kda_jit.layers import KimiDeltaAttention
from cake_kda_jit.runtime import load

pytestmark = pytest.mark.gpu

HEADS, HEAD_DIM, HIDDEN = 2, 128, 256
MAX_DOCUMENTS, MAX_TOKENS = 6, 512
PACKS = [(512,), (65, 0, 1, 200), (64, 64, 64, 64, 44, 1), (130,), (0, 0)]

HAS_BACKWARD = any(record.program == "chunk_grad" and record.family == "smxx" for record in registry().shipped())
needs_backward = pytest.mark.skipif(not HAS_BACKWARD, reason="no CUDA record of chunk_grad")


def boundaries_of(lengths, documents: int | None = None) -> torch.Tensor:
    """On the device; with ``documents``, filled up with empty ones."""
    lengths = [*lengths, *[0] * ((documents or len(lengths)) - len(lengths))]
    return torch.tensor([0, *lengths]).cumsum(0).cuda()


def plan_of(lengths, **options):
    return make_plan(boundaries_of(lengths), num_heads=HEADS, head_dim=HEAD_DIM, device="cuda", **options)


def capacity_plan(lengths, **options):
    return plan_of(lengths, max_documents=MAX_DOCUMENTS, max_tokens=MAX_TOKENS, **options)


def padded(problem: Problem, fill: float) -> Problem:
    """The problem on the device, in tensors of the capacity's size; rows behind the pack hold ``fill``."""
    moved = problem.to("cuda")
    inputs = {}
    for name, tensor in moved.inputs.items():
        inputs[name] = tensor.new_full((1, MAX_TOKENS, *tensor.shape[2:]), fill)
        inputs[name][:, : tensor.shape[1]] = tensor
    state = moved.keywords["initial_state"]
    more = state.new_zeros(MAX_DOCUMENTS - state.shape[0], *state.shape[1:])
    return Problem(inputs, {**moved.keywords, "initial_state": torch.cat([state, more])})


def make_layer() -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM).cuda().bfloat16()


def make_input(tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).cuda().bfloat16()


def gradients(layer, x, call=None, **keywords) -> list[torch.Tensor]:
    """The output, and the gradients of x and of every parameter."""
    leaves = [x.clone().requires_grad_(), *layer.parameters()]
    o = (layer if call is None else call)(leaves[0], **keywords)
    return [o.detach(), *torch.autograd.grad(o.float().square().sum(), leaves)]


def assert_equal(found, expected) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# ---- capacity plans --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment_tokens", [None, 64])
def test_a_capacity_plans_forward_has_the_bits_of_an_exact_plan(segment_tokens, nan_poison):
    plan = capacity_plan(PACKS[0], segment_tokens=segment_tokens)
    for lengths in PACKS:
        tokens, documents = sum(lengths), len(lengths)
        problem = make_problem(lengths, heads=HEADS, head_dim=HEAD_DIM)
        plan.update(boundaries_of(lengths))
        whole, exact = padded(problem, torch.nan), problem.to("cuda")
        with torch.no_grad():
            o, state = chunk_kda(*whole.inputs.values(), plan=plan, output_final_state=True, **whole.keywords)
            expected, expected_state = chunk_kda(
                *exact.inputs.values(),
                plan=plan_of(lengths, segment_tokens=segment_tokens),
                output_final_state=True,
                **exact.keywords,
            )
        assert torch.equal(o[:, :tokens], expected) and (o[:, tokens:] == 0).all(), lengths
        assert torch.equal(state[:documents], expected_state) and (state[documents:] == 0).all(), lengths


@needs_backward
@pytest.mark.parametrize("segment_tokens", [None, 64])
def test_a_capacity_plans_gradients_have_the_bits_of_an_exact_plan(segment_tokens, nan_poison):
    """NaN behind the pack, in inputs and in the gradient of o, reaches nothing."""
    plan = capacity_plan(PACKS[0], segment_tokens=segment_tokens)
    for lengths in PACKS:
        tokens = sum(lengths)
        problem = make_problem(lengths, heads=HEADS, head_dim=HEAD_DIM)
        whole, exact = padded(problem, torch.nan), problem.to("cuda")
        do = torch.full((1, MAX_TOKENS, HEADS, HEAD_DIM), torch.nan, device="cuda", dtype=torch.bfloat16)
        do[:, :tokens] = torch.randn(1, tokens, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(2)).cuda()
        plan.update(boundaries_of(lengths))
        found = []
        for given, direction, own_plan in (
            (whole, do, plan),
            (exact, do[:, :tokens], plan_of(lengths, segment_tokens=segment_tokens)),
        ):
            leaves = [tensor.clone().requires_grad_() for tensor in given.inputs.values()]
            o, _ = chunk_kda(*leaves, plan=own_plan, **given.keywords)
            found.append(torch.autograd.grad(o, leaves, direction))
        for name, one, other in zip(NAMES, *found, strict=True):
            assert torch.equal(one[:, :tokens], other) and (one[:, tokens:] == 0).all(), (lengths, name)


def test_the_convolution_with_a_capacity_plan(nan_poison):
    plan, generator = capacity_plan(PACKS[0]), torch.Generator().manual_seed(0)
    weight = torch.randn(64, 4, generator=generator).cuda().requires_grad_()
    for lengths in PACKS:
        tokens = sum(lengths)
        plan.update(boundaries_of(lengths))
        x, dy = (torch.full((1, MAX_TOKENS, 64), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        x[:, :tokens], dy[:, :tokens] = (torch.randn(1, tokens, 64, generator=generator).cuda() for _ in range(2))
        found = []
        for end, own_plan in ((MAX_TOKENS, plan), (tokens, plan_of(lengths))):
            leaf = x[:, :end].clone().requires_grad_()
            y, _ = causal_conv1d(leaf, weight, plan=own_plan)
            found.append((y.detach(), *torch.autograd.grad(y, (leaf, weight), dy[:, :end])))
        (y, dx, dweight), (expected_y, expected_dx, expected_dweight) = found
        assert torch.equal(y[:, :tokens], expected_y) and (y[:, tokens:] == 0).all(), lengths
        assert torch.equal(dx[:, :tokens], expected_dx) and (dx[:, tokens:] == 0).all(), lengths
        # The sum over tokens is cut into tiles by the tensors' size, so only fp32 rounding is equal.
        torch.testing.assert_close(dweight, expected_dweight, rtol=1e-4, atol=1e-4)


def test_boundaries_that_are_no_pack_stop_the_device():
    """In a process of its own: a failed assertion on the device ends every later call there."""
    code = (
        "import torch\n"
        "from cake_kda_jit import make_plan\n"
        "plan = make_plan(torch.tensor([0, 5]), num_heads=1, device='cuda', max_documents=3, max_tokens=9)\n"
        "plan.update(torch.tensor([0, 3, 9], device='cuda'))\n"
        "torch.cuda.synchronize()\n"
        "print('good')\n"
        "plan.update(torch.tensor([0, 3, 10], device='cuda'))\n"
        "torch.cuda.synchronize()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.startswith("good") and ran.returncode != 0
    assert "device-side assert" in ran.stdout + ran.stderr


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


def warmed_up(step) -> None:
    """As torch.cuda.graph asks: some runs on a side stream, which load every kernel."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)


def test_a_captured_forward_replays_other_packs():
    layer, plan = make_layer(), capacity_plan(PACKS[0])
    x, boundaries = make_input(MAX_TOKENS), boundaries_of(PACKS[0], MAX_DOCUMENTS)

    def step():
        plan.update(boundaries)
        with torch.no_grad():
            return layer(x, plan=plan)

    warmed_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step()
    for lengths in PACKS:
        boundaries.copy_(boundaries_of(lengths, MAX_DOCUMENTS))
        graph.replay()
        tokens = sum(lengths)
        with torch.no_grad():
            # The projections' products may be cut in another way for another number of rows, so T stays.
            expected = layer(x, plan=capacity_plan(lengths))
        assert torch.equal(o[:, :tokens], expected[:, :tokens]), lengths


@needs_backward
def test_a_captured_training_step_replays_other_packs():
    """Forward and backward in one graph: parameters' gradients equal those of the same step run eagerly."""
    layer, plan = make_layer(), capacity_plan(PACKS[0])
    x, boundaries = make_input(MAX_TOKENS), boundaries_of(PACKS[0], MAX_DOCUMENTS)

    def step():
        plan.update(boundaries)
        layer.zero_grad(set_to_none=False)
        layer(x, plan=plan).float().square().sum().backward()

    warmed_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in PACKS:
        boundaries.copy_(boundaries_of(lengths, MAX_DOCUMENTS))
        graph.replay()
        found = [p.grad.clone() for p in layer.parameters()]
        expected = gradients(layer, x, plan=capacity_plan(lengths))[2:]
        assert_equal(found, expected)


def graphed_layer(layer: KimiDeltaAttention):
    """The layer as torch.cuda.make_graphed_callables captures it, called with an input and the lengths of a pack."""
    x, boundaries = make_input(MAX_TOKENS).requires_grad_(), boundaries_of(PACKS[0], MAX_DOCUMENTS)
    graphed = GraphedLayer(layer, capacity_plan(PACKS[0]), x, boundaries)

    def call(x, lengths):
        boundaries.copy_(boundaries_of(lengths, MAX_DOCUMENTS))
        return graphed(x, boundaries)

    return call


@needs_backward
def test_a_graphed_layer_has_the_bits_of_the_eager_one(graphs_collected):
    """Values and gradients, of other inputs and other documents than those of the capture."""
    layer = make_layer()
    graphed = graphed_layer(layer)
    for seed, lengths in enumerate(PACKS):
        x = make_input(MAX_TOKENS, seed)
        found = gradients(layer, x, graphed, lengths=lengths)
        assert_equal(found, gradients(layer, x, plan=capacity_plan(lengths)))


@needs_backward
def test_a_graphed_layer_trains_as_the_eager_one(graphs_collected):
    """The optimizer changes the parameters in place, where the graphs read them, and drops their gradients."""
    trained = []
    for is_graphed in (True, False):
        layer, losses = make_layer(), []
        graphed = graphed_layer(layer) if is_graphed else None
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        for seed, lengths in enumerate(PACKS[:4] * 2):
            x = make_input(MAX_TOKENS, seed)
            o = graphed(x, lengths) if is_graphed else layer(x, plan=capacity_plan(lengths))
            losses.append((o - x).float().square().mean())
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        trained.append([*losses, *layer.parameters()])
    assert_equal(*trained)
    assert losses[4] < losses[0]


@needs_backward
def test_gradients_of_a_graphed_layer_add_up(graphs_collected):
    """Over two packs, in gradients that the parameters already have: those of a graph are its own memory."""
    found = []
    for is_graphed in (True, False):
        layer = make_layer()
        graphed = graphed_layer(layer) if is_graphed else None
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for seed, lengths in enumerate(PACKS[:2]):
            x = make_input(MAX_TOKENS, seed)
            o = graphed(x, lengths) if is_graphed else layer(x, plan=capacity_plan(lengths))
            o.float().square().sum().backward()
        found.append([parameter.grad for parameter in layer.parameters()])
    assert_equal(*found)


def test_the_drop_ins_graph_mode_replays_other_documents():
    problem = padded(make_problem((300, 100), heads=HEADS, head_dim=HEAD_DIM), 0.0)
    boundaries = boundaries_of((300, 100), MAX_DOCUMENTS)
    inputs = [problem.inputs[name] for name in NAMES]

    def step():
        with torch.no_grad():
            return fla.chunk_kda(*inputs, cu_seqlens=boundaries, use_graph=True, **problem.keywords)[0]

    warmed_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step()
    for lengths in PACKS:
        boundaries.copy_(boundaries_of(lengths, MAX_DOCUMENTS))
        graph.replay()
        assert torch.equal(o, step()), lengths


def test_a_cold_call_in_a_capture_is_an_error(monkeypatch):
    problem = padded(make_problem((300,), heads=HEADS, head_dim=HEAD_DIM), 0.0)
    plan = capacity_plan((300,))
    monkeypatch.setattr(load, "_kernels", {})
    with pytest.raises(ColdCallInCapture, match="run the same call once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        chunk_kda(*problem.inputs.values(), plan=plan, **problem.keywords)


# ---- no synchronisation ----------------------------------------------------------------------------------------------


@contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_plans_and_batches_never_synchronise():
    """Making a plan with a host copy, updating one, and calls with either; a batch of equal lengths needs no plan."""
    on_host, sizes = torch.tensor([0, 100, 300]), {"num_heads": HEADS, "head_dim": HEAD_DIM, "device": "cuda"}
    layer, x = make_layer(), make_input(300)
    with no_synchronisation(), torch.no_grad():
        plan = make_plan(on_host, **sizes)
        layer(x, plan=plan)
        layer(x)
        capacity = make_plan(on_host, **sizes, max_documents=4, max_tokens=300)
        capacity.update(plan.cu_seqlens)
        layer(x, plan=capacity)


@needs_backward
def test_a_training_step_never_synchronises():
    layer, x, plan = make_layer(), make_input(300), plan_of((100, 200))
    with no_synchronisation():
        layer(x, plan=plan).sum().backward()


# ---- compiled and in autocast ----------------------------------------------------------------------------------------


@needs_backward
def test_compiled_with_a_plan_of_every_pack():
    torch._dynamo.reset()
    begin = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    layer = make_layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for number, lengths in enumerate([(70, 30), (128, 64, 3, 9), (20, 50, 6), (500, 2, 2)]):
        x, plan = make_input(sum(lengths)), plan_of(lengths)
        o, dx, *others = gradients(layer, x, compiled, plan=plan)
        eager_o, eager_dx, *eager_others = gradients(layer, x, plan=plan)
        assert_equal((o, *others), (eager_o, *eager_others))
        # An eager layer adds up the six products of dx otherwise. Each product and each partial sum may be off by 2^-8
        # of itself, half that in the mean: of eleven that do not know of each other, in both, below a hundredth.
        assert (dx.float() - eager_dx.float()).norm() <= 0.01 * eager_dx.float().norm()
        if number == 0:
            kernels = load.loaded_kernels()
    assert load.loaded_kernels() == kernels
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - begin == 2
    torch._dynamo.reset()


@needs_backward
def test_autocast():
    layer = KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o = layer(make_input(300).float(), plan=plan_of((100, 200)))
    assert o.dtype == torch.bfloat16
    o.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())


def test_a_stream_of_its_own():
    """Launches follow the current stream: a result behind a busy stream is right all the same."""
    layer, x, plan = make_layer(), make_input(300), plan_of((100, 200))
    with torch.no_grad():
        expected = layer(x, plan=plan)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            shifted = x.clone()
            found = layer(shifted, plan=plan)
        stream.synchronize()
    assert torch.equal(found, expected)
