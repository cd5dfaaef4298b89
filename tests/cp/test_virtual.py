"""Ranks as threads of one process: who runs when, and that nothing waits for ever."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit import (
    CommunicationError,
    KcpContext,
    Partition,
    PlanMismatchError,
    UnsupportedProblemError,
    VirtualGroup,
    causal_conv1d,
    chunk_kda,
    gather,
    reduce_parameter_gradients,
    run_virtual,
)
from cake_kda_jit.bench.problems import NAMES, make_problem


def context(world_size: int = 3, tokens: int = 90) -> KcpContext:
    return KcpContext(Partition.contiguous([0, tokens], world_size), VirtualGroup(world_size))


def message(ctx: KcpContext, label: str = "message") -> list[float]:
    """Give every other rank one's number, and take theirs."""
    others = [rank for rank in range(ctx.world_size) if rank != ctx.rank]
    received = {rank: torch.empty(1) for rank in others}
    ctx.channel.start({rank: torch.full((1,), float(ctx.rank)) for rank in others}, received, label).wait()
    return [received[rank].item() for rank in others]


def test_one_rank_runs_at_a_time_and_yields_in_exchanges_only():
    events = []

    def fn(rank, ctx):
        events.append((rank, "begin"))
        message(ctx)
        events.append((rank, "between"))
        found = message(ctx, "second")
        events.append((rank, "end"))
        return found

    run = run_virtual(context(), fn)
    assert run.results == [[1.0, 2.0], [0.0, 2.0], [0.0, 1.0]]
    # The last rank to begin finds all messages there, and goes on to the next exchange.
    assert events == [
        *[(0, "begin"), (1, "begin"), (2, "begin"), (2, "between")],
        *[(0, "between"), (1, "between"), (1, "end"), (2, "end"), (0, "end")],
    ]


def test_a_rank_that_fails_ends_all_and_its_error_is_told():
    told = {}

    def fn(rank, ctx):
        try:
            if rank == 1:
                raise KeyError("broken")
            message(ctx)
        except CommunicationError as error:
            told[rank] = str(error)
            raise

    with pytest.raises(KeyError, match="broken"):
        run_virtual(context(), fn)
    assert set(told) == {0} and "rank 1 failed" in told[0], "rank 2 had not begun"


def test_ranks_that_wait_for_each_other_are_told_so():
    def fn(rank, ctx):
        message(ctx, "odd" if rank == 2 else "even")

    with pytest.raises(CommunicationError, match="no rank can go on: rank 0 waits for messages of 'even' from ranks"):
        run_virtual(context(), fn)


def test_a_rank_that_ends_too_early_is_named():
    def fn(rank, ctx):
        if rank < 2:
            message(ctx)

    with pytest.raises(CommunicationError, match=r"ranks \[2\] have ended"):
        run_virtual(context(), fn)


def test_first_calls_that_differ_are_found():
    ctx = context(2)

    def fn(rank, own):
        problem = make_problem((45,), with_state=False, dtype=torch.float32 if rank else torch.bfloat16)
        with pytest.raises(PlanMismatchError, match="rank 1 has dtype = 'fp32', rank 0 has dtype = 'bf16'"):
            chunk_kda(**problem.inputs, cp_context=own)

    run_virtual(ctx, fn)


def test_gather_and_reduce_on_virtual_ranks():
    ctx = context()
    x = torch.randn(2, 90, 3)

    def fn(rank, own):
        local = ctx.partition.shard(x, rank).requires_grad_()
        whole = gather(local, own)
        (whole * (rank + 1)).sum().backward()
        parameter = torch.zeros(4, requires_grad=True)
        parameter.grad = torch.full((4,), float(rank))
        reduce_parameter_gradients(own, parameter)
        return whole.detach(), local.grad, parameter.grad

    for whole, gradient, total in run_virtual(ctx, fn).results:
        assert torch.equal(whole, x)
        assert (gradient == 1 + 2 + 3).all() and (total == 0 + 1 + 2).all()


def test_frozen_parameters_stay_without_gradients():
    def fn(rank, own):
        parameters = [torch.zeros(2, requires_grad=wanted) for wanted in (False, True, False)]
        reduce_parameter_gradients(own, *parameters)
        reduce_parameter_gradients(own, parameters[0])
        return [parameter.grad for parameter in parameters]

    for first, wanted, last in run_virtual(context(), fn).results:
        assert first is None and last is None and torch.equal(wanted, torch.zeros(2))


def test_grad_mode_is_the_callers():
    with torch.no_grad():
        assert run_virtual(context(), lambda rank, own: torch.is_grad_enabled()).results == [False] * 3


def test_a_context_serves_run_after_run():
    ctx = context(2)
    problem = make_problem((90,))

    def fn(rank, own):
        inputs = [ctx.partition.shard(problem.inputs[name], rank) for name in NAMES]
        return chunk_kda(*inputs, cp_context=own, **problem.keywords)[0]

    first, second = run_virtual(ctx, fn), run_virtual(ctx, fn)
    assert all(torch.equal(one, other) for one, other in zip(first.results, second.results))


def test_a_context_serves_after_a_run_that_failed():
    ctx = context(2)
    problem = make_problem((90,), with_state=False)

    def fn(rank, own, fails=False):
        inputs = [ctx.partition.shard(problem.inputs[name], rank) for name in NAMES]
        if fails and rank == 1:
            raise KeyError("broken")
        return chunk_kda(*inputs, cp_context=own, **problem.keywords)[0]

    expected = run_virtual(context(2), fn).results
    with pytest.raises(KeyError, match="broken"):
        run_virtual(ctx, lambda rank, own: fn(rank, own, fails=True))
    assert all(torch.equal(one, other) for one, other in zip(run_virtual(ctx, fn).results, expected))


def test_wrong_use_is_refused():
    with pytest.raises(UnsupportedProblemError, match="world_size=0"):
        VirtualGroup(0)
    ctx = context(1)
    with pytest.raises(UnsupportedProblemError, match="the context's group is NoneType|has no attribute"):
        run_virtual(type("Other", (), {"group": None})(), lambda rank, own: None)
    with pytest.raises(UnsupportedProblemError, match="of_rank belongs to VirtualGroup contexts"):
        ctx.of_rank(0).of_rank(0)
    for rank in (1, -1, None):
        with pytest.raises(UnsupportedProblemError, match=f"rank={rank}; give one of the 1 ranks"):
            ctx.of_rank(rank)
    with pytest.raises(UnsupportedProblemError, match="run_virtual needs KcpContext"):
        run_virtual(3, lambda rank, own: None)
    with pytest.raises(UnsupportedProblemError, match="already running"):
        run_virtual(ctx, lambda rank, own: run_virtual(ctx, lambda *_: None))
    two = context(2)
    with pytest.raises(UnsupportedProblemError, match="inside run_virtual"):
        causal_conv1d(torch.zeros(1, 45, 8), torch.zeros(8, 4), cp_context=two.of_rank(0))
    for call in (lambda: gather(torch.zeros(1), None), lambda: reduce_parameter_gradients(None)):
        with pytest.raises(UnsupportedProblemError, match="ctx is NoneType; give a KcpContext"):
            call()
    with pytest.raises(UnsupportedProblemError, match="no leaf tensor"):
        reduce_parameter_gradients(ctx.of_rank(0), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(UnsupportedProblemError, match=r"of type list, .* \*module.parameters"):
        reduce_parameter_gradients(ctx.of_rank(0), [torch.zeros(2)])
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedProblemError, match="torch.sparse_coo; only dense ones are summed"):
        reduce_parameter_gradients(ctx.of_rank(0), embedding.weight)
