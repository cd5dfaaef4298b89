"""Parts of a pass are recorded once: what a later call may change changes nothing that was recorded."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit import KcpContext, KcpOptions, Partition, VirtualGroup, chunk_kda, last_launches, run_virtual
from cake_kda_jit.errors import PlanMismatchError, UnsupportedProblemError

BOUNDARIES = [0, 200, 330]
HEADS, DIM, RANKS = 2, 64, 2
NAMES = ("q", "k", "v", "g", "beta")


@pytest.fixture
def ctx() -> KcpContext:
    return KcpContext(Partition.per_document_zigzag(BOUNDARIES, RANKS), VirtualGroup(RANKS))


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, BOUNDARIES[-1], HEADS, DIM, generator=generator) for _ in range(3))
    g = -0.1 * torch.rand(1, BOUNDARIES[-1], HEADS, DIM, generator=generator)
    return dict(zip(NAMES, (q, k, v, g, torch.rand(1, BOUNDARIES[-1], HEADS, generator=generator))))


def run(ctx: KcpContext, tensors: dict[str, torch.Tensor], change=lambda x: x, **keywords) -> list[list[torch.Tensor]]:
    """o, final states and gradients of each rank; ``change`` makes other tensors of the same values of its own."""

    def rank_of(rank: int, own: KcpContext) -> list[torch.Tensor]:
        parts = [own.partition.shard(x, rank).detach().requires_grad_() for x in tensors.values()]
        given = [change(x) for x in parts]
        o, state = chunk_kda(*given, use_qk_l2norm_in_kernel=True, output_final_state=True, cp_context=own, **keywords)
        return [o, state, *torch.autograd.grad(o.square().sum() + state.sum(), parts)]

    return run_virtual(ctx, rank_of).results


def same(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(x, y) for mine, yours in zip(found, expected) for x, y in zip(mine, yours))


def num_parts(ctx: KcpContext) -> list[int]:
    return [len(ctx.of_rank(rank).parts) for rank in range(RANKS)]


def test_a_second_call_records_nothing_and_takes_other_values(ctx):
    first = run(ctx, inputs(0))
    recorded = num_parts(ctx)
    assert all(recorded)
    other = run(ctx, inputs(1))
    assert num_parts(ctx) == recorded
    assert same(run(ctx, inputs(0)), first) and not same(other, first)
    assert same(other, run(KcpContext(ctx.partition, VirtualGroup(RANKS)), inputs(1)))


def test_other_transforms_and_layouts_are_recorded_anew(ctx):
    first = run(ctx, inputs())
    recorded = num_parts(ctx)
    scaled = run(ctx, inputs(), scale=0.5)
    assert all(map(int.__gt__, num_parts(ctx), recorded))
    assert same(scaled, run(KcpContext(ctx.partition, VirtualGroup(RANKS)), inputs(), scale=0.5))
    recorded = num_parts(ctx)
    with_gaps = run(ctx, inputs(), change=lambda x: torch.cat([x, x], dim=2)[:, :, :HEADS])
    assert all(map(int.__gt__, num_parts(ctx), recorded))
    assert same(with_gaps, first)


@pytest.mark.parametrize("exchange", ("all_gather", "spread", "relay"))
def test_a_context_keeps_the_walk_that_its_ranks_have_compared(exchange, monkeypatch):
    def walks(rank: int, own: KcpContext) -> list[str]:
        chunk_kda(*(own.partition.shard(x, rank) for x in inputs().values()), cp_context=own)
        return [one.reason for one in last_launches() if one.program == "transfer_walk"]

    monkeypatch.delenv("CAKE_KDA_JIT_TRANSFER_WALK", raising=False)
    partition = Partition.per_document_zigzag(BOUNDARIES, RANKS)

    def context() -> KcpContext:
        return KcpContext(partition, VirtualGroup(RANKS), options=KcpOptions(exchange=exchange))

    def sources(ctx: KcpContext) -> set[str]:
        return {reason for found in run_virtual(ctx, walks).results for reason in found}

    unnamed = context()
    monkeypatch.setenv("CAKE_KDA_JIT_TRANSFER_WALK", "tf32_hilo")
    named = context()
    assert sources(unnamed) == {"bf16x3_hw64 by default"}, "also the first call reads no environment"
    monkeypatch.setenv("CAKE_KDA_JIT_TRANSFER_WALK", "bf16x3")
    assert sources(unnamed) == {"bf16x3_hw64 by default"}
    assert sources(named) == {"tf32_hilo by argument"}


def test_a_call_accounts_for_its_launches_every_time(ctx):
    def launches(rank: int, own: KcpContext) -> list[str]:
        parts = [own.partition.shard(x, rank) for x in inputs().values()]
        chunk_kda(*parts, cp_context=own)
        return [one.program for one in last_launches()]

    first = run_virtual(ctx, launches).results
    assert run_virtual(ctx, launches).results == first
    assert all({"chunk_prepare", "chunk_scan", "segment_summary"} >= set(one) - {"transfer_walk"} for one in first)
    assert all("chunk_scan" in one for one in first)


def test_what_was_checked_once_is_still_checked_where_it_differs(ctx):
    run(ctx, inputs())

    def refused(error: type[Exception], match: str, change=lambda x: x, **keywords) -> None:
        def rank_of(rank: int, own: KcpContext) -> None:
            parts = [change(own.partition.shard(x, rank)) for x in inputs().values()]
            with pytest.raises(error, match=match):
                chunk_kda(*parts, use_qk_l2norm_in_kernel=True, output_final_state=True, cp_context=own, **keywords)

        run_virtual(ctx, rank_of)

    refused(PlanMismatchError, "tokens", change=lambda x: x[:, :-1])
    refused(UnsupportedProblemError, "lower_bound", use_gate_in_kernel=True, lower_bound=-7.0, A_log=torch.zeros(HEADS))
    refused(UnsupportedProblemError, "options", options=KcpOptions())
    refused(UnsupportedProblemError, "plan", plan=object())
