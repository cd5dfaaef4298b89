"""Random packs and partitions for the context-parallel tests, and calls on all ranks of a VirtualGroup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from hypothesis import strategies as st
from torch import Tensor

from cake_kda_jit import KcpContext, KcpOptions, Partition, VirtualGroup, causal_conv1d, chunk_kda, run_virtual
from cake_kda_jit.bench.problems import NAMES, Problem
from cake_kda_jit.ops.parallel import short_convolutions

LAYOUTS = ("contiguous", "zigzag", "per_document_zigzag")
EXCHANGES = ("all_gather", "spread", "relay")
CHANNELS = (8, 8, 16)
"""Of q, k and v: with more value heads than heads, v has more."""
PER_TOKEN = ("o", "y", "dq", "dk", "dv", "dg", "dbeta", "dx")


def boundaries(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


@st.composite
def partitions(draw, lengths: st.SearchStrategy, max_ranks: int = 9) -> Partition:
    """Any layout, or random fragments that ranks hold in a random order."""
    cu = boundaries(draw(lengths))
    world_size = draw(st.integers(1, max_ranks))
    layout = draw(st.sampled_from((*LAYOUTS, "balanced", "custom")))
    if layout == "custom":
        return random_fragments(cu, world_size, draw(st.integers(0, 2**32 - 1)))
    if layout == "balanced":
        return Partition.balanced(cu, world_size, whole_below=draw(st.sampled_from((0, 10, 70))))
    return getattr(Partition, layout)(cu, world_size)


def random_fragments(cu: Sequence[int], world_size: int, seed: int) -> Partition:
    """Cuts anywhere, most of them far apart but some a token or two, on any ranks, in any order."""
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    ranges, start = [], 0
    while start < cu[-1]:
        end = min(start + 1 + below((1, 3, 40)[below(3)]), cu[-1])
        ranges.append((below(world_size), start, end))
        start = end
    order = torch.randperm(len(ranges), generator=generator).tolist() if below(2) else range(len(ranges))
    return Partition.from_fragments(cu, [ranges[index] for index in order], world_size)


@dataclass
class Found:
    """Tensors of the whole pack by name, put together from all ranks', and what each rank returned."""

    whole: dict[str, Tensor]
    ranks: list[dict[str, Tensor]]
    seconds: list[float]


def put_together(partition: Partition, ranks: list[dict[str, Tensor]], seconds=()) -> Found:
    """Tokens in the order of the pack; of states and parameters, which are parts, the sum."""
    whole = {}
    for name in ranks[0]:
        parts = [one[name] for one in ranks]
        whole[name] = partition.unshard(parts) if name in PER_TOKEN else sum(parts)
    return Found(whole, ranks, list(seconds))


def output_gradients(problem: Problem) -> tuple[Tensor, Tensor]:
    """The fixed random gradients of o and of the final states that ``problems.run`` takes."""
    generator = torch.Generator().manual_seed(99)
    do = torch.randn(problem.inputs["v"].shape, generator=generator)
    heads, head_dim = problem.inputs["v"].shape[2:]
    dfinal_state = torch.randn(problem.cu_seqlens.shape[0] - 1, heads, head_dim, head_dim, generator=generator)
    return do.to(problem.inputs["q"]), dfinal_state.to(problem.cu_seqlens.device)


def attention_of_rank(problem: Problem, ctx: KcpContext, **extra) -> dict[str, Tensor]:
    """Outputs and gradients of one rank, under the names of ``problems.run``."""
    partition, rank = ctx.partition, ctx.rank
    leaves = {
        name: (partition.shard(tensor, rank) if name in NAMES else tensor).detach().clone().requires_grad_()
        for name, tensor in problem.leaves().items()
    }
    keywords = {**problem.keywords, **{name: leaf for name, leaf in leaves.items() if name not in NAMES}, **extra}
    inputs = [leaves[name] for name in NAMES]
    o, final_state = chunk_kda(*inputs, cp_context=ctx, output_final_state=True, **keywords)
    do, dfinal_state = output_gradients(problem)
    torch.autograd.backward([o, final_state], [partition.shard(do, rank), dfinal_state])
    found = {"o": o.detach(), "final_state": final_state.detach()}
    return found | {"d" + name: leaf.grad for name, leaf in leaves.items()}


def run_ranks(partition: Partition, fn: Callable[[KcpContext], dict], options: KcpOptions | None = None) -> Found:
    """``fn(ctx)`` on every rank of a VirtualGroup."""
    ctx = KcpContext(partition, VirtualGroup(partition.world_size), options=options)
    run = run_virtual(ctx, lambda rank, own: fn(own))
    return put_together(partition, run.results, run.seconds)


def attention(problem: Problem, partition: Partition, options: KcpOptions | None = None, **extra) -> Found:
    return run_ranks(partition, lambda ctx: attention_of_rank(problem, ctx, **extra), options)


@dataclass
class ConvProblem:
    """x ``[1, T, D]``, weight ``[D, W]``, bias ``[D]`` and initial_state ``[N, D, W - 1]``, either may be None."""

    cu: list[int]
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    initial_state: Tensor | None
    dy: Tensor
    dfinal_state: Tensor

    def tensors(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in ("x", "weight", "bias", "initial_state")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def conv_problem(
    cu, *, width=4, channels=8, dtype=torch.float32, state_dtype=None, with_bias=True, with_state=True, seed=0
):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(dtype)

    state = (len(cu) - 1, channels, width - 1)
    return ConvProblem(
        list(cu),
        x=randn(1, cu[-1], channels),
        weight=randn(channels, width),
        bias=randn(channels) if with_bias else None,
        initial_state=randn(*state, dtype=state_dtype or dtype) if with_state else None,
        dy=randn(1, cu[-1], channels),
        dfinal_state=randn(*state, dtype=(state_dtype or dtype) if with_state else dtype),
    )


def conv_call(problem: ConvProblem, function=causal_conv1d, ctx: KcpContext | None = None, dtype=None, **extra) -> dict:
    """Outputs and gradients of the whole pack, or of a rank's part of it."""
    part = (lambda x: x) if ctx is None else (lambda x: ctx.partition.shard(x, ctx.rank))
    leaves = {
        name: (part(tensor) if name == "x" else tensor).detach().to(dtype or tensor.dtype).clone().requires_grad_()
        for name, tensor in problem.tensors().items()
    }
    where = {"cu_seqlens": torch.tensor(problem.cu)} if ctx is None else {"cp_context": ctx}
    y, final_state = function(**leaves, **where, **extra)
    gradients = [part(problem.dy), problem.dfinal_state]
    torch.autograd.backward([y, final_state], [g.to(out.dtype) for g, out in zip(gradients, (y, final_state))])
    found = {"y": y.detach(), "final_state": final_state.detach()}
    return found | {"d" + name: leaf.grad for name, leaf in leaves.items()}


def convolution(problem: ConvProblem, partition: Partition) -> Found:
    return run_ranks(partition, lambda ctx: conv_call(problem, ctx=ctx, output_final_state=True))


def three_convolutions(
    ctx: KcpContext, *, together: bool, width: int = 4, dtype=torch.bfloat16, device="cpu"
) -> dict[str, Tensor]:
    """Outputs and gradients of q, k and v of one rank, with an exchange for all or one each."""
    shapes = {"width": width, "dtype": dtype, "with_bias": False, "with_state": False}
    problems = [conv_problem(ctx.partition.cu_seqlens, channels=c, seed=n, **shapes) for n, c in enumerate(CHANNELS)]
    rows = [ctx.partition.shard(one.x, ctx.rank).to(device, copy=True).requires_grad_() for one in problems]
    weights = [one.weight.to(device, copy=True).requires_grad_() for one in problems]
    if together:
        outputs = short_convolutions(rows, weights, ctx)
    else:
        outputs = [causal_conv1d(x, weight, cp_context=ctx)[0] for x, weight in zip(rows, weights)]
    torch.autograd.backward(list(outputs), [ctx.partition.shard(one.dy, ctx.rank).to(device) for one in problems])
    found = {f"y{n}": y.detach() for n, y in enumerate(outputs)} | {f"dx{n}": x.grad for n, x in enumerate(rows)}
    return found | {f"dweight{n}": weight.grad for n, weight in enumerate(weights)}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
