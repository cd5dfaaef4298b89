"""The context-parallel operators: schema, fakes, autograd registration, and tracing, by opcheck."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit import KcpContext, KcpOptions, Partition, UnsupportedProblemError, VirtualGroup, chunk_kda
from cake_kda_jit.bench.problems import make_problem
from cake_kda_jit.cp.library import OPERATORS
from cake_kda_jit.cp.virtual import Baton
from cake_kda_jit.layers import KimiDeltaAttention


@pytest.fixture
def one_rank():
    """Opcheck calls an operator many times; a group of one rank exchanges nothing, but may ask for its baton."""

    def make(lengths, **options) -> KcpContext:
        cu = torch.tensor([0, *lengths]).cumsum(0)
        group = VirtualGroup(1)
        group.baton = Baton(1)
        return KcpContext(Partition.contiguous(cu, 1), group, options=KcpOptions(**options)).of_rank(0)

    return make


@pytest.mark.parametrize(
    "backward, keep_decayed_qk", [("saved", False), ("saved", True), ("replay", False), (None, False)]
)
@pytest.mark.parametrize("optional", [True, False])
def test_attention(one_rank, optional, backward, keep_decayed_qk):
    ctx = one_rank((140, 0, 25), backward=backward or "saved", checkpoint_tokens=64, keep_decayed_qk=keep_decayed_qk)
    problem = make_problem((140, 0, 25))
    inputs = [tensor.requires_grad_() for tensor in problem.inputs.values()]
    extra = [None] * 3
    if optional:
        extra = [problem.keywords[name].requires_grad_() for name in ("A_log", "dt_bias", "initial_state")]
    else:
        inputs[3] = (-inputs[3].detach().float().abs()).requires_grad_()
    ctx._fix_problem(("bf16", 2, 2, 64, "cpu"), inputs[0].device)
    transforms = (0.125, -5.0, True, *(("bounded", "sigmoid") if optional else ("ready", "ready")))
    sizes = (ctx.handle, ctx.num_documents, *ctx._sizes)
    options = (ctx.options.backward, ctx.options.checkpoint_tokens, keep_decayed_qk)
    arguments = (*inputs, *extra, *sizes, *transforms, *options, optional, backward is not None)
    checks = ("test_schema", "test_faketensor") if backward is None else None
    torch.library.opcheck(OPERATORS.kcp_chunk_kda_forward, arguments, **({"test_utils": checks} if checks else {}))


@pytest.mark.parametrize("optional", [True, False])
def test_convolution(one_rank, optional):
    ctx = one_rank((12, 8))
    x, weight = torch.randn(1, 20, 8, requires_grad=True), torch.randn(8, 4, requires_grad=True)
    extra = [torch.randn(8, requires_grad=True), torch.randn(2, 8, 3, requires_grad=True)] if optional else [None] * 2
    torch.library.opcheck(OPERATORS.kcp_causal_conv1d_forward, (x, weight, *extra, ctx.handle, 2, 0, True, optional))


def test_short_convolutions(one_rank):
    ctx = one_rank((12, 8))
    rows = [torch.randn(1, 20, channels, requires_grad=True) for channels in (4, 4, 6)]
    weights = [torch.randn(channels, 4, requires_grad=True) for channels in (4, 4, 6)]
    torch.library.opcheck(OPERATORS.kcp_short_convolutions_forward, (*rows, *weights, ctx.handle, 0))


def test_gather(one_rank):
    ctx = one_rank((12, 8))
    torch.library.opcheck(OPERATORS.kcp_gather, (torch.randn(2, 20, 3, requires_grad=True), ctx.handle, 1, 20, 20))


def test_a_compiled_call_is_one_graph_and_has_the_bits_of_an_eager_one(one_rank):
    """A first call outside fixes dtype and head sizes; that agreement of the ranks cannot be traced."""
    ctx = one_rank((40, 30))
    problem = make_problem((40, 30), with_state=False)
    inputs = [tensor.requires_grad_() for tensor in problem.inputs.values()]

    def loss(*inputs):
        return chunk_kda(*inputs, cp_context=ctx, **problem.keywords)[0].float().square().sum()

    def gradients(function):
        return torch.autograd.grad(function(*inputs), inputs)

    eager = gradients(loss)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert all(torch.equal(mine, yours) for mine, yours in zip(gradients(compiled), eager))


def test_contexts_of_other_packs_share_the_graphs(one_rank):
    """A compiled layer makes one graph, one for sizes that change, and takes every later context as it is."""
    layer = KimiDeltaAttention(32, num_heads=1, head_dim=64, kernel_dtype=torch.float32)
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    compiled = torch.compile(layer, backend=backend)
    for step, lengths in enumerate(
        ((40, 30), (25, 10, 61), (90,), (5, 0, 33, 1), (64, 64), (17, 3), (8, 8, 8), (200,))
    ):
        ctx = one_rank(lengths)
        x = torch.randn(1, sum(lengths), 32)
        for _ in range(2):  # the first call of a context lets the ranks agree, which is not traced
            found, expected = compiled(x, cp_context=ctx), layer(x, cp_context=ctx)
            assert torch.equal(found, expected)
        if step == 3:
            made = len(graphs)
    assert len(graphs) == made, "a new context was compiled for"


def test_a_second_derivative_is_refused(one_rank):
    ctx = one_rank((6,))
    x = torch.randn(1, 6, 4, requires_grad=True)
    y, *_ = OPERATORS.kcp_causal_conv1d_forward(x, torch.randn(4, 4), None, None, ctx.handle, 1, 0, True, False)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(UnsupportedProblemError, match="a second derivative is not supported"):
        gradient.sum().backward()


def test_a_graph_keeps_its_context_alive(one_rank):
    ctx = one_rank((6,))
    x = torch.randn(1, 6, 4, requires_grad=True)
    outputs = OPERATORS.kcp_causal_conv1d_forward(x, torch.randn(4, 4), None, None, ctx.handle, 1, 0, True, False)
    handle = ctx.handle
    del ctx
    outputs[0].sum().backward()
    assert torch.isfinite(x.grad).all()
    del outputs
    with pytest.raises(UnsupportedProblemError, match=f"handle {handle} is gone"):
        OPERATORS.kcp_causal_conv1d_forward(x, torch.randn(4, 4), None, None, handle, 1, 0, True, False)


def test_a_context_is_not_pickled(one_rank):
    import pickle

    with pytest.raises(UnsupportedProblemError, match="make one in each process"):
        pickle.dumps(one_rank((6,)))
