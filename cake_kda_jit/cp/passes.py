"""``chunk_kda`` of one rank: the chunk pipeline over its spans, around an exchange of states.

Per head block, forward and, the other way round, backward:

    chunk_prepare; summaries of inner spans; scan of heads      -> what this rank gives: states, M and B
    start the exchange; scan of whole documents
    (the next head block does all of this while the exchange is under way)
    end the exchange: what enters each other span; their scan
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..ops.inputs import Inputs, Transforms
from ..ops.pipeline import Pipeline, Tiles
from ..ops.walk import walk
from ..ops.workspace import HeadBlock, head_blocks, tile_bytes_per_head
from .states import Given, OwnSpans, RelayExchange, WalkExchange
from .tables import LocalTables, PhaseTables

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
SKIP_NOTHING = {"first_M": False, "first_B": False, "last_B": False}


@dataclass(frozen=True)
class ParallelPass:
    """One forward or backward of one rank: its context, its tables and its pipeline over all spans."""

    ctx: KcpContext
    tables: LocalTables
    pipeline: Pipeline
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

    def state(self, size: int) -> torch.Tensor:
        """Return an empty fp32 tensor ``[size, HV, K, V]``."""
        inputs = self.inputs
        shape = (size, inputs.num_value_heads, inputs.head_dim, inputs.head_dim)
        return torch.empty(shape, dtype=torch.float32, device=inputs.k.device)

    def filled(self, states: torch.Tensor | None, block: HeadBlock, values: torch.Tensor) -> torch.Tensor:
        """Return states of all heads with a block's ``[n, HB, K, V]``; None before the first block."""
        if block.count == self.inputs.num_value_heads:
            return values
        states = self.state(values.shape[0]) if states is None else states
        states[:, block.first : block.first + block.count] = values
        return states

    def of_phase(self, phase: PhaseTables, initial_state: torch.Tensor | None = None) -> Pipeline:
        """Return the pipeline over the spans of a phase, as documents."""
        inputs = replace(
            self.inputs,
            segment_table=phase.segment_table,
            summary_offsets=phase.summary_offsets,
            initial_state=initial_state,
        )
        return replace(self.pipeline, inputs=inputs)

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

    def summarize(self, block: HeadBlock, tiles: Tiles, *, M, B, do=None) -> None:
        """Fill the block's heads of the summary rows of all spans that have some."""
        if self.tables.num_summaries and self.has_chunks:
            self.pipeline.summarize(block, tiles, M=M, B=B, do=do, skip=SKIP_NOTHING)

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
        options = self.ctx.options
        return walk(
            M,
            B,
            initial,
            offsets,
            variant=options.transfer_walk,
            precision_mode=options.precision_mode,
            transpose=transpose,
            family=options.family,
        )

    def start(self, block: HeadBlock, heads: torch.Tensor, M, B) -> Callable[[], torch.Tensor]:
        """Start a block's exchange; the function returned ends it and gives what enters spans, ``[n, HB, K, V]``."""
        if not self.ctx.parallel_plan.needs_exchange:
            return lambda: self.state(0)[:, : block.count]
        M, B = self.inner_summaries(block, M, B)
        exchange = get_exchange(self.ctx, block.count, self.backward, B.device)
        given = Given(heads[:, block.first : block.first + block.count], M, B)
        label = f"{self.label}, heads from {block.first}"
        return exchange.start(self.ctx.channel, label, given, partial(self.walk, transpose=self.backward))


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
        return WalkExchange(schedule, own, heads, device, delivers=ctx.exchange == "spread", backward=backward)

    return ctx.cached(("exchange", heads, backward, device), make)


def make_inputs(tables: LocalTables, tensors: tuple) -> Inputs:
    """Return checked tensors, q, k, v, g, beta, A_log, dt_bias, initial_state, with the tables of all spans."""
    every = tables.all
    return Inputs(*tensors, tables.chunk_table, every.segment_table, every.summary_offsets, tables.num_summaries, False)


def make_pass(ctx: KcpContext, tensors: tuple, transforms: tuple, *, backward: bool) -> ParallelPass:
    """Return a pass over checked tensors and transforms. Every rank makes the same passes in the same order."""
    tables, options = ctx.tables(tensors[1].device), ctx.options
    inputs = make_inputs(tables, tensors)
    pipeline = Pipeline(inputs, Transforms(*transforms), options.family, options.transfer_walk, options.precision_mode)
    return ParallelPass(ctx, tables, pipeline, backward, ctx.next_label("backward" if backward else "forward"))
