"""``chunk_kda`` of one rank: the chunk pipeline over its spans, around an exchange of states.

Per head block, forward and, the other way round, backward:

    chunk_prepare; summaries of inner spans; scan of heads      -> what this rank gives: states, M and B
    start the exchange; scan of whole documents
    (the next head block does all of this while the exchange is under way)
    end the exchange: what enters each other span; their scan
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..ops.forward import CONTEXT_NAMES, Context
from ..ops.inputs import Inputs, Transforms
from ..ops.keys import num_threads
from ..ops.pipeline import Pipeline, Tiles
from ..ops.recorder import Executor, layout_of
from ..ops.walk import walk, walk_into
from ..ops.workspace import HeadBlock, head_blocks, tile_bytes_per_head
from .parts import Tensors, run_part
from .states import Given, OwnSpans, RelayExchange, WalkExchange
from .tables import LocalTables

if TYPE_CHECKING:
    from .context import KcpContext

HIDE_BYTES = 64 << 20
"""What a rank must receive in a round for half of it to be hidden behind the other half's kernels: 0.3 ms at 200 GB/s.

Two blocks of heads take longer than one where documents are long, for their chains fill fewer processors.
"""
RANK_LIMIT = 6_400_000_000
"""Bytes of scratch of a rank where no ``workspace_limit`` is given.

The same for both backwards: a rank holds a part of a pack, in long spans, and heads that take turns have each the time
of the longest chain.
"""
GIVEN = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "chunk_table")
"""The inputs that every part of a pass is given."""
EVERY_HEAD = HeadBlock(0, 0)
"""In the key of a part that no block of heads is cut for."""
SKIP_NOTHING = {"first_M": False, "first_B": False, "last_B": False}


@dataclass(frozen=True)
class ParallelPass:
    """One forward or backward of one rank: its context, its tables and its pipeline over all spans."""

    ctx: KcpContext
    tables: LocalTables
    pipeline: Pipeline
    do: torch.Tensor | None
    backward: bool
    label: str

    @property
    def inputs(self) -> Inputs:
        """The inputs; their tables are those of all spans."""
        return self.pipeline.inputs

    @property
    def has_chunks(self) -> bool:
        """Whether the rank holds any token."""
        return self.pipeline.num_chunks > 0

    def state_shape(self, size: int) -> tuple[int, int, int, int]:
        """``[size, HV, K, V]``."""
        inputs = self.inputs
        return size, inputs.num_value_heads, inputs.head_dim, inputs.head_dim

    def state(self, size: int) -> torch.Tensor:
        """Return an empty fp32 tensor ``[size, HV, K, V]``."""
        return torch.empty(self.state_shape(size), dtype=torch.float32, device=self.inputs.device)

    def filled(self, states: torch.Tensor | None, block: HeadBlock, values: torch.Tensor) -> torch.Tensor:
        """Return states of all heads with a block's ``[n, HB, K, V]``; None before the first block."""
        if block.count == self.inputs.num_value_heads:
            return values
        states = self.state(values.shape[0]) if states is None else states
        states[:, block.first : block.first + block.count] = values
        return states

    def run_part(self, name: str, block: HeadBlock, function: Callable[[Part], Sequence], tensors: Tensors) -> Sequence:
        """Return ``function(part)``, recorded once for calls on tensors of the same layouts.

        ``tensors`` are named; those of the rank's inputs are added. All that are not the caller's are contiguous.
        """
        return self.prepare_part(name, block, function, tensors)({})

    def prepare_part(
        self, name: str, block: HeadBlock, function: Callable[[Part], Sequence], tensors: Tensors
    ) -> Callable[[Tensors], Sequence]:
        """Return ``run_part`` as a function of the tensors that come late, for the time that a rank waits for them."""
        tensors = self.given | tensors
        key = (self.backward, name, block, self.key, *[one is None for one in tensors.values()])

        def record(executor: Executor, operands: Tensors) -> Sequence:
            return function(Part(self, block, executor, operands))

        return lambda late: run_part(self.ctx, key, tensors | late, record)

    @cached_property
    def given(self) -> Tensors:
        """The inputs of all parts but states, by name, with the table of chunks."""
        inputs = self.inputs
        return {name: getattr(inputs, name) for name in GIVEN}

    @cached_property
    def key(self) -> tuple:
        """What decides a pass's launches beside its direction and what is absent: layouts, transforms and options."""
        strided = [layout_of(one) for one in (*self.given.values(), self.do)]
        return (*strided, self.pipeline.transforms, *self.where)

    @cached_property
    def where(self) -> tuple:
        """What decides every launch: the device, the cpu kernels' threads, and the walk."""
        return self.inputs.device, num_threads(self.inputs.k), *self.form.values()

    @cached_property
    def form(self) -> dict[str, object]:
        """The walk that the options name, as ``ops.walk`` takes it; ``transpose`` is missing."""
        options = self.ctx.options
        return {
            "variant": options.transfer_walk,
            "precision_mode": options.precision_mode,
            "family": options.family,
        }

    def blocks(self, states: int, values: int, kept: tuple[str, ...]) -> tuple[list[HeadBlock], int]:
        """Return the head blocks, alike on all ranks, and how many are under way at a time.

        ``states``, ``values`` and ``kept`` are as in ``tile_bytes_per_head``.
        """
        ctx, inputs, plan = self.ctx, self.inputs, self.ctx.parallel_plan
        heads, value_heads = inputs.num_heads, inputs.num_value_heads
        sizes = plan.most_chunks, inputs.head_dim, self.pipeline.tile_dtype.itemsize
        per_head = tile_bytes_per_head(*sizes, states=states, values=values, kept=kept)
        limit = ctx.options.workspace_limit or max(RANK_LIMIT, 2 * per_head * (value_heads // heads))
        whole = head_blocks(per_head, heads, value_heads, limit)
        if not plan.needs_exchange or len(whole) == heads:
            return whole, 1
        most = max(plan.traffic(ctx.exchange, value_heads, self.backward).most_in_round)
        if most * 4 * inputs.head_dim**2 < HIDE_BYTES:
            return whole, 1
        if len(whole) == 1:
            half = -(-heads // 2) * (value_heads // heads)
            return [HeadBlock(first, min(half, value_heads - first)) for first in range(0, value_heads, half)], 2
        return head_blocks(2 * per_head, heads, value_heads, limit), 2

    def run(self, steps: Callable[[HeadBlock], Iterator[None]], **scratch: int | tuple[str, ...]) -> None:
        """Run a head block's steps, which yield once, when the exchange is under way, for all head blocks.

        ``scratch`` is what ``blocks`` takes.
        """
        key = ("blocks", self.backward, *scratch.values())
        blocks, most_under_way = self.ctx.cached(key, lambda: self.blocks(**scratch))
        under_way: deque[Iterator[None]] = deque()
        for block in blocks:
            begun = steps(block)
            next(begun)
            under_way.append(begun)
            if len(under_way) == most_under_way:
                next(under_way.popleft(), None)
        for begun in under_way:
            next(begun, None)

    # ---- summaries and their exchange ----

    def inner_summaries(self, block: HeadBlock, M, B) -> tuple[torch.Tensor, torch.Tensor]:
        """Return M and B (or D) of the inner spans, ``[n, HB, K, V]``, from those of their segments."""
        inner = self.tables.inner
        if inner.size == 0:
            empty = self.state(0)[:, : block.count]
            return empty, empty
        first, end = inner.summary_rows
        M, B = (x[first:end, block.first : block.first + block.count].contiguous() for x in (M, B))
        if not inner.is_cut:
            return M, B
        offsets = inner.summary_offsets - first
        identity = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
        identity = identity.expand(inner.size, *M.shape[1:]).contiguous()
        _, whole_M = self.walk(M, torch.zeros_like(M), identity, offsets, transpose=False)
        _, whole_B = self.walk(M, B, None, offsets, transpose=self.backward)
        return whole_M, whole_B

    def walk(self, M, B, initial, offsets, *, transpose: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The walk that the options name."""
        return walk(M, B, initial, offsets, transpose=transpose, **self.form)

    def walk_pool(self, exchange: WalkExchange, taken: torch.Tensor) -> torch.Tensor:
        """See ``states.PoolWalker``."""
        num_steps, num_found, size = exchange.num_entries, exchange.num_found, taken.shape[-1]

        def function(executor: Executor, tensors: Tensors) -> Sequence:
            each = tensors["taken"].view((taken.shape[0], 1, size, size))
            pool = executor.empty((exchange.delivered.end, 1, size, size), torch.float32, taken.device)
            M, B, initial = each[:num_steps], each[num_steps : 2 * num_steps], each[2 * num_steps :]
            given, found = (M, B, initial, tensors["offsets"]), (pool[:num_steps], pool[num_steps:num_found])
            walk_into(executor, given, found, transpose=self.backward, **self.form)
            return (pool.view((exchange.delivered.end, size, size)),)

        if num_steps == 0:
            pool = taken.new_empty((exchange.delivered.end, size, size))
            pool[:num_found] = taken
            return pool
        key = ("walk", self.backward, exchange.heads, *self.where)
        return run_part(self.ctx, key, {"taken": taken, "offsets": exchange.offsets}, function)[0]

    def start(self, block: HeadBlock, heads: torch.Tensor, M, B) -> Callable[[], torch.Tensor]:
        """Start a block's exchange; the function returned ends it and gives what enters spans, ``[n, HB, K, V]``."""
        if not self.ctx.parallel_plan.needs_exchange:
            return lambda: self.state(0)[:, : block.count]
        M, B = self.inner_summaries(block, M, B)
        exchange = get_exchange(self.ctx, block.count, self.backward, B.device)
        given = Given(heads[:, block.first : block.first + block.count], M, B)
        label = f"{self.label}, heads from {block.first}"
        walker = self.walk_pool if isinstance(exchange, WalkExchange) else partial(self.walk, transpose=self.backward)
        return exchange.start(self.ctx.channel, label, given, walker)


class Part(NamedTuple):
    """A part of a pass on one head block: tensors, or operands, by name; see ``ParallelPass.run_part``."""

    call: ParallelPass
    block: HeadBlock
    executor: Executor
    tensors: Tensors

    def pipeline(self, segment_table=None, summary_offsets=None, initial_state=None) -> Pipeline:
        """Return the pipeline over the spans of a table, as documents."""
        tensors, pipeline = self.tensors, self.call.pipeline
        inputs = Inputs(
            **{name: tensors[name] for name in GIVEN},
            initial_state=initial_state,
            segment_table=self.call.tables.all.segment_table if segment_table is None else segment_table,
            summary_offsets=summary_offsets,
            num_summaries=pipeline.inputs.num_summaries,
            executor=self.executor,
        )
        return replace(pipeline, inputs=inputs)

    @property
    def context(self) -> Context:
        """What the forward keeps."""
        return Context(**{name: self.tensors[name] for name in CONTEXT_NAMES})

    def tiles(self) -> Tiles:
        """Return the tiles that the pass's first part has made."""
        return self.pipeline().make_tiles(self.block, memory=self.tensors["memory"], **self.context.tiles(self.block))

    def summarize(self, tiles: Tiles, *, M, B, do=None) -> None:
        """Fill the block's heads of the summary rows of all spans that have some."""
        if self.call.tables.num_summaries:
            pipeline = self.pipeline(self.tensors["summarized"])
            pipeline.summarize(self.block, tiles, M=M, B=B, do=do, skip=SKIP_NOTHING)


def get_exchange(ctx: KcpContext, heads: int, backward: bool, device: torch.device) -> WalkExchange | RelayExchange:
    """Return a context's exchange of ``heads`` value heads, made once."""

    def make() -> WalkExchange | RelayExchange:
        plan, rank = ctx.parallel_plan, ctx.rank
        phases, inner = plan.phases(rank, backward), ctx.tables(device).inner.spans
        own = OwnSpans(
            *(tuple(plan.place_of(rank, number, backward) for number in numbers)
              for numbers in (phases.heads, inner, phases.entered))
        )  # fmt: skip
        schedule = plan.schedule(ctx.exchange, rank, heads, backward)
        if ctx.exchange == "relay":
            return RelayExchange(schedule, own, heads, device)
        return WalkExchange(
            schedule, own, heads, device, rank=rank, delivers=ctx.exchange == "spread", backward=backward
        )

    return ctx.cached(("exchange", heads, backward, device), make)


def make_inputs(tables: LocalTables, tensors: tuple) -> Inputs:
    """Return checked tensors, q, k, v, g, beta, A_log, dt_bias, initial_state, with the tables of all spans."""
    every = tables.all
    return Inputs(*tensors, tables.chunk_table, every.segment_table, every.summary_offsets, tables.num_summaries, False)


def make_pass(
    ctx: KcpContext, tensors: tuple, transforms: tuple, *, backward: bool, do: torch.Tensor | None = None
) -> ParallelPass:
    """Return a pass over checked tensors and transforms. Every rank makes the same passes in the same order."""
    tables, options = ctx.tables(tensors[1].device), ctx.options
    inputs = make_inputs(tables, tensors)
    pipeline = Pipeline(inputs, Transforms(*transforms), options.family, options.transfer_walk, options.precision_mode)
    return ParallelPass(ctx, tables, pipeline, do, backward, ctx.next_label("backward" if backward else "forward"))
