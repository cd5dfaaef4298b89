"""The layer inside PyTorch: compiled, in autocast, recomputed, copied, pickled, in other processes."""

from __future__ import annotations

import copy
import multiprocessing
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cake_kda_jit import KdaOptions, UnsupportedProblemError, causal_conv1d, last_launches, make_plan
from cake_kda_jit.bench.problems import make_problem
from cake_kda_jit.layers import KimiDeltaAttention
from cake_kda_jit.ops.api import chunk_kda
from cake_kda_jit.runtime import load

HIDDEN, HEADS, HEAD_DIM = 32, 2, 64


def make_layer(**options) -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM, **options)


def make_input(tokens: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def plan_of(lengths, **options):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return make_plan(cu_seqlens, num_heads=HEADS, head_dim=HEAD_DIM, device="cpu", **options)


def gradients(layer: nn.Module, x: torch.Tensor, call=None, **keywords) -> list[torch.Tensor]:
    """The output, and the gradients of x and of every parameter."""
    leaves = [x.clone().requires_grad_(), *layer.parameters()]
    o = (layer if call is None else call)(leaves[0], **keywords)
    return [o.detach(), *torch.autograd.grad(o.float().square().sum(), leaves)]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs():
    """How many graphs torch.compile has made in this test, as a function."""
    torch._dynamo.reset()
    begin = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"] - begin
    torch._dynamo.reset()


PACKS = [(70, 30), (128, 64, 3, 9), (20, 50, 6), (500, 2, 2), (1, 0, 300, 33, 7), (64, 65)]


def test_compiled_with_a_plan_of_every_pack(graphs):
    """A second graph, made when every size has changed once, serves all other packs; no kernel is compiled again.

    The backend runs the same operations in the same order, so the bits are those of the eager layer.
    """
    layer = make_layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for number, lengths in enumerate(PACKS):
        x, plan = make_input(sum(lengths)), plan_of(lengths)
        assert_equal(gradients(layer, x, compiled, plan=plan), gradients(layer, x, plan=plan))
        if number == 0:
            kernels = load.loaded_kernels()
    assert graphs() == 2
    assert load.loaded_kernels() == kernels


def test_compiled_with_a_capacity_plan(graphs):
    layer, x = make_layer(), make_input(512)
    plan = plan_of((512,), max_documents=6, max_tokens=512)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for lengths in PACKS:
        plan.update(torch.tensor([0, *lengths]).cumsum(0))
        assert_equal(gradients(layer, x, compiled, plan=plan), gradients(layer, x, plan=plan))
    assert graphs() == 1


def test_equal_options_share_a_graph(graphs):
    """Whatever objects their numbers are: as parsed, or unpickled in another process."""
    layer, x, plan = make_layer(lower_bound=float("-3.5")), make_input(100), plan_of((70, 30))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = gradients(layer, x, plan=plan)
    for _ in range(3):
        layer.lower_bound = float("-3.5")
        options = KdaOptions("replay", int("512"), int("5000000"))
        assert_equal(gradients(layer, x, compiled, plan=plan, options=options), expected)
    assert graphs() == 1


def test_compiled_over_batches(graphs):
    layer = make_layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for batch, tokens in [(2, 70), (3, 50), (2, 129), (5, 33)]:
        x = make_input(tokens, batch)
        assert_equal(gradients(layer, x, compiled), gradients(layer, x))
    assert graphs() == 2


def test_compiled_by_inductor():
    """The operators in generated code, forward and backward. Nothing else is in the graph, so the bits are equal.

    Without torch's cache of compiled graphs, which knows operators by name and not by schema.
    """
    problem, plan = make_problem((70, 30), dtype=torch.float32, with_state=False), plan_of((70, 30))
    leaves = [tensor.requires_grad_() for tensor in problem.inputs.values()]

    def call(*inputs):
        return chunk_kda(*inputs, plan=plan, **problem.keywords)[0]

    expected = call(*leaves)
    with torch._inductor.config.patch(force_disable_caches=True):
        found = torch.compile(call, fullgraph=True)(*leaves)
        gradients_found = torch.autograd.grad(found.sum(), leaves)
    assert_equal([found, *gradients_found], [expected, *torch.autograd.grad(expected.sum(), leaves)])
    torch._dynamo.reset()


def test_boundaries_in_a_compiled_call_ask_for_a_plan(graphs):
    """They would be read on the host. A graph that may break runs the call as it is."""
    layer, x, cu_seqlens = make_layer(), make_input(100), torch.tensor([0, 30, 100])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="call make_plan outside and pass the plan"):
        torch.compile(layer, fullgraph=True, backend="eager")(x, cu_seqlens=cu_seqlens)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager")
    assert torch.equal(compiled(x, cu_seqlens=cu_seqlens), layer(x, cu_seqlens=cu_seqlens))


# ---- derivatives of other kinds --------------------------------------------------------------------------------------

TRANSFORMS = {
    "grad": lambda call, x: torch.func.grad(lambda t: call(t).sum())(x),
    "vjp": torch.func.vjp,
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "jacrev": lambda call, x: torch.func.jacrev(call)(x),
    "vmap": lambda call, x: torch.vmap(call)(x.unsqueeze(0)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("operation", ["chunk_kda", "causal_conv1d"])
def test_transforms_are_refused_by_name(operation, transform):
    problem = make_problem((20,), with_state=False)
    q, *others = problem.inputs.values()
    x, call = {
        "chunk_kda": (q, lambda t: chunk_kda(t, *others, **problem.keywords)[0]),
        "causal_conv1d": (make_input(5), lambda t: causal_conv1d(t, torch.ones(HIDDEN, 4))[0]),
    }[operation]
    with pytest.raises(UnsupportedProblemError, match=f"{operation} is called inside a transform of torch.func"):
        TRANSFORMS[transform](call, x)


def test_forward_mode_is_refused_by_name():
    x = make_input(5)
    with torch.autograd.forward_ad.dual_level():
        causal_conv1d(x, torch.ones(HIDDEN, 4))  # no tangent, nothing to refuse
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(
            UnsupportedProblemError, match="causal_conv1d is given a tensor with a forward-mode tangent"
        ):
            causal_conv1d(dual, torch.ones(HIDDEN, 4))


# ---- autocast, checkpointing, plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    layer, x = make_layer(), make_input(100)
    with torch.autocast("cpu", dtype=dtype):
        o = layer(x, cu_seqlens=torch.tensor([0, 30, 100]))
        variants = {launched.variant for launched in last_launches()}
    assert o.dtype == dtype and variants == {f"{'bf16' if dtype == torch.bfloat16 else 'fp16'}_k64"}
    o.float().square().sum().backward()
    assert all(p.grad.dtype == p.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())
    # Every product and every stored tensor is rounded to the low precision: a few times 2^-8.
    exact = layer(x, cu_seqlens=torch.tensor([0, 30, 100]))
    assert (o - exact).norm() <= 0.03 * exact.norm()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_bits(use_reentrant):
    layer, x, plan = make_layer(), make_input(100), plan_of((70, 30))

    def recomputed(x, **keywords):
        return checkpoint(layer, x, use_reentrant=use_reentrant, **keywords)

    if use_reentrant:  # takes no keywords

        def recomputed(x, plan):
            return checkpoint(lambda y: layer(y, plan=plan), x, use_reentrant=True)

    found, expected = [], []
    for call, kept in ((recomputed, found), (layer, expected)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        call(leaf, plan=plan).square().sum().backward()
        kept += [leaf.grad, *(p.grad for p in layer.parameters())]
    assert_equal(found, expected)


def test_selective_checkpointing_sees_the_operators(monkeypatch):
    """A policy that keeps the attention's outputs: the backward runs each convolution again, but not the attention."""
    programs, plain = [], load.Kernel.launch_all

    def launch_all(self, steps, *rest):
        programs.extend(step.kernel.record.program for step in steps.each)
        plain(self, steps, *rest)

    monkeypatch.setattr(load.Kernel, "launch_all", launch_all)

    def policy(context, operator, *args, **kwargs):
        is_attention = operator == torch.ops.cake_kda_jit.chunk_kda_forward.default
        return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE

    layer, x, plan = make_layer(), make_input(100).requires_grad_(), plan_of((70, 30))
    o = checkpoint(
        layer, x, use_reentrant=False, plan=plan, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    )
    [found] = torch.autograd.grad(o.square().sum(), [x])
    assert programs.count("conv_forward") == 6 and programs.count("chunk_scan") == 1
    [expected] = torch.autograd.grad(layer(x, plan=plan).square().sum(), [x])
    assert torch.equal(found, expected)


def test_one_plan_serves_every_layer():
    layers, plan = (
        [make_layer(), make_layer(lower_bound=-5.0), make_layer(kernel_dtype=torch.bfloat16)],
        plan_of((70, 30)),
    )
    x = y = make_input(100)
    for layer in layers:
        x = x + layer(x, plan=plan)
        assert "pack_tables" not in {launched.program for launched in last_launches()}
        y = y + layer(y, cu_seqlens=torch.tensor([0, 70, 100]))
    assert torch.equal(x, y)


# ---- copies and processes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_of_the_layer(copied, tmp_path):
    layer, x, plan = make_layer(lower_bound=-5.0), make_input(100), plan_of((70, 30))
    twin = copied(layer)
    assert torch.equal(twin(x, plan=plan), layer(x, plan=plan))
    twin.bfloat16()
    assert twin.A_log.dtype == torch.float32 and layer.q_proj.weight.dtype == torch.float32
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = make_layer(lower_bound=-5.0)
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(other(x, plan=plan), layer(x, plan=plan))


def test_parameters_made_later_on_a_device():
    """As FSDP sets up large models: on the meta device first, then given memory and values."""
    with torch.device("meta"):
        layer = KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM)
    layer.to_empty(device="cpu")
    for module in layer.modules():
        module.reset_parameters()
    assert layer(make_input(20)).isfinite().all()
    assert layer.A_log.dtype == torch.float32 and 0 <= layer.A_log.min() <= layer.A_log.max() <= 2.8


def trained(queue, layer, plan) -> None:
    torch.set_num_threads(1)
    queue.put([tensor.numpy() for tensor in gradients(layer, make_input(100), plan=plan)])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers(method):
    """A forked worker inherits the loaded kernels, a spawned one imports everything and takes a pickled plan."""
    layer, plan = make_layer(), plan_of((70, 30))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork does not survive the thread pool of torch's own operators
    try:
        expected = gradients(layer, make_input(100), plan=plan)
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        worker = context.Process(target=trained, args=(queue, layer, plan))
        worker.start()
        found = queue.get(timeout=120)
        worker.join(timeout=60)
    finally:
        torch.set_num_threads(threads)
    assert worker.exitcode == 0
    assert_equal([torch.from_numpy(array) for array in found], expected)
