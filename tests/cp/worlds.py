"""Checks that run in real processes over gloo: ``python -m tests.cp.worlds W`` starts W of them once, for all checks.

It prints one JSON object: check -> the traceback of each rank that failed. A check that breaks its group makes one of
its own; the last check ends a process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from cake_kda_jit import (
    CommunicationError,
    KcpContext,
    KcpOptions,
    Partition,
    PlanMismatchError,
    causal_conv1d,
    chunk_kda,
    gather,
    reduce_parameter_gradients,
)
from cake_kda_jit.bench.problems import NAMES, make_problem
from cake_kda_jit.layers import KimiDeltaAttention

from .ranks import (
    EXCHANGES,
    LAYOUTS,
    assert_same_bits,
    attention,
    attention_of_rank,
    boundaries,
    conv_call,
    conv_problem,
    convolution,
    three_convolutions,
)

PACK = (130, 0, 1, 90, 3)


def short_timeout(world: int) -> float:
    """Seconds: the timeout of exchanges that are meant to fail. More processes than processors take turns."""
    return 1.5 if world <= 4 else 2.0


def agreed(value: object) -> None:
    """Every rank has the same value."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert all(other == found[0] for other in found), found


@contextmanager
def raises(error: type[Exception], *parts: str, within: float = 20.0, same: bool = True):
    """The block raises in time, with these words, and with the same text on all ranks."""
    begin, caught = time.monotonic(), None
    try:
        yield
    except error as one:
        caught = one
    assert caught is not None, f"no {error.__name__}"
    assert time.monotonic() - begin < within, "it took too long"
    assert all(part in str(caught) for part in parts), str(caught)
    if same:
        agreed(str(caught))


def problem_of(partition: Partition, **how):
    cu = partition.cu_seqlens
    return make_problem([end - start for start, end in zip(cu, cu[1:])], **how)


# ---- the same as in one process --------------------------------------------------------------------------------------


def every_layout_and_exchange_has_the_bits_of_virtual_ranks(rank: int, world: int) -> None:
    for layout in LAYOUTS:
        partition = getattr(Partition, layout)(boundaries(PACK), world)
        problem = problem_of(partition)
        expected = attention(problem, partition).ranks[rank]
        for exchange, backward in zip(EXCHANGES, ("saved", "replay", "saved")):
            ctx = KcpContext(partition, options=KcpOptions(exchange=exchange, backward=backward))
            assert_same_bits(attention_of_rank(problem, ctx), expected)


def the_convolution_has_the_bits_of_virtual_ranks(rank: int, world: int) -> None:
    fragments = [(token * 7 % world, token, token + 1) for token in range(9)] + [(world - 1, 9, 40)]
    for partition in (
        Partition.from_fragments([0, 2, 11, 40], fragments, world),
        Partition.per_document_zigzag(boundaries(PACK), world),
    ):
        problem = conv_problem(partition.cu_seqlens, dtype=torch.bfloat16, state_dtype=torch.float32)
        expected = convolution(problem, partition).ranks[rank]
        found = conv_call(problem, ctx=KcpContext(partition), output_final_state=True)
        assert_same_bits(found, expected)


def three_convolutions_share_an_exchange(rank: int, world: int) -> None:
    for partition in (
        Partition.from_fragments([0, 2, 11], [(token * 7 % world, token, token + 1) for token in range(11)], world),
        Partition.per_document_zigzag(boundaries(PACK), world),
    ):
        ctx = KcpContext(partition)
        before = ctx.channel.num_exchanges
        together = three_convolutions(ctx, together=True)
        assert ctx.channel.num_exchanges == before + 2, "one forward, one backward"
        assert_same_bits(together, three_convolutions(ctx, together=False))


def contexts_of_several_packs_may_alternate(rank: int, world: int) -> None:
    partitions = [Partition.contiguous([0, 150], world), Partition.zigzag([0, 60, 200], world)]
    contexts = [KcpContext(partition) for partition in partitions]
    for _ in range(2):
        for partition, ctx in zip(partitions, contexts):
            problem = problem_of(partition)
            assert_same_bits(attention_of_rank(problem, ctx), attention(problem, partition).ranks[rank])


def gather_gives_the_whole_and_sums_its_gradients(rank: int, world: int) -> None:
    partition = Partition.zigzag([0, 7, 23], world)
    ctx = KcpContext(partition)
    x = torch.arange(23 * 4, dtype=torch.float32).view(1, 23, 4)
    local = partition.shard(x, rank).requires_grad_()
    whole = gather(local, ctx)
    assert torch.equal(whole, x)
    weights = [torch.randn(1, 23, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(world)]
    (whole * weights[rank]).sum().backward()
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    assert torch.equal(local.grad, partition.shard(total, rank))
    rows = gather(partition.shard(x[0], rank, dim=0).bfloat16(), ctx, dim=0)
    assert torch.equal(rows, x[0].bfloat16())


def a_sub_group_translates_its_ranks(rank: int, world: int) -> None:
    members = list(range(1, world))
    group = dist.new_group(members)
    if rank not in members:
        return
    partition = Partition.contiguous([0, 150], len(members))
    problem = problem_of(partition)
    ctx = KcpContext(partition, group)
    assert (ctx.rank, ctx.world_size) == (rank - 1, world - 1)
    assert_same_bits(attention_of_rank(problem, ctx), attention(problem, partition).ranks[ctx.rank])


# ---- models ----------------------------------------------------------------------------------------------------------


def loss_and_gradients(layer, x, recompute: bool, **where) -> tuple[float, list[torch.Tensor]]:
    layer.zero_grad()
    run = (lambda y: checkpoint(layer, y, use_reentrant=False, **where)) if recompute else (lambda y: layer(y, **where))
    loss = run(x).float().square().sum()
    loss.backward()
    return loss.item(), [parameter.grad for parameter in layer.parameters()]


def parameter_gradients_are_those_of_one_rank_after_one_reduction(rank: int, world: int) -> None:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(32, num_heads=2, head_dim=64, kernel_dtype=torch.float32)
    cu = boundaries((40, 1, 2, 90))
    x = torch.randn(1, cu[-1], 32)
    _, expected = loss_and_gradients(layer, x, False, cu_seqlens=torch.tensor(cu))
    for layout in LAYOUTS:
        partition = getattr(Partition, layout)(cu, world)
        ctx = KcpContext(partition)
        _, found = loss_and_gradients(layer, partition.shard(x, rank), False, cp_context=ctx)
        parts = [gradient.clone() for gradient in found]
        reduce_parameter_gradients(ctx, *layer.parameters())
        reduced = [parameter.grad for parameter in layer.parameters()]
        for mine, whole in zip(reduced, expected):
            # fp32 sums over the tokens in another order; gradients of the gate cancel by a factor of about 100.
            assert (mine - whole).norm() <= 1e-4 * max(whole.norm(), 1e-3)
        agreed([blake2b(gradient.numpy().tobytes()).hexdigest() for gradient in reduced])
        # Recomputing issues the same exchanges again, in the same order on all ranks.
        _, again = loss_and_gradients(layer, partition.shard(x, rank), True, cp_context=ctx)
        for mine, yours in zip(again, parts):
            assert torch.equal(mine, yours)


def missing_gradients_count_as_0(rank: int, world: int) -> None:
    ctx = KcpContext(Partition.contiguous([0, 2], world))
    names = ("missing here and there", "missing everywhere", "bf16", "fp64")
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float64)
    parameters = {name: torch.zeros(3, dtype=dtype, requires_grad=True) for name, dtype in zip(names, dtypes)}
    for name in ("bf16", "fp64") + (("missing here and there",) if rank == world - 1 else ()):
        parameters[name].grad = torch.full((3,), 1.0 + rank, dtype=parameters[name].dtype)
    reduce_parameter_gradients(ctx, *parameters.values())
    total = world * (world + 1) / 2
    for name, value in zip(names, (world, 0, total, total)):
        assert parameters[name].grad.tolist() == [value] * 3, name
        assert parameters[name].grad.dtype == parameters[name].dtype


def a_rank_that_owns_nothing_has_zero_gradients(rank: int, world: int) -> None:
    """Two tokens, more ranks: the others take part with empty tensors."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(32, num_heads=1, head_dim=64, kernel_dtype=torch.float32)
    for fragments in ([(0, 0, 2)], [(world - 1, 0, 1), (0, 1, 2)]):
        partition = Partition.from_fragments([0, 2], fragments, world)
        ctx = KcpContext(partition)
        owns = partition.num_local_tokens(rank) > 0
        x = torch.randn(1, partition.num_local_tokens(rank), 32)
        _, gradients = loss_and_gradients(layer, x, False, cp_context=ctx)
        for gradient in gradients:
            assert gradient is not None and (owns or not gradient.any())


# ---- disagreements ---------------------------------------------------------------------------------------------------


def ranks_that_differ_get_the_same_error(rank: int, world: int) -> None:
    odd = world - 1
    base = Partition.contiguous([0, 10, 24], world)
    others = {
        "cu_seqlens": Partition.contiguous([0, 11, 24], world),
        "layout": Partition.from_fragments(
            base.cu_seqlens, [(f.rank, f.start, f.end) for f in base.all_fragments()], world
        ),
        "world_size": Partition.contiguous([0, 10, 24], world + 1),
    }
    for field, other in others.items():
        with raises(PlanMismatchError, f"rank {odd} has {field} = ", f"rank 0 has {field} = "):
            KcpContext(other if rank == odd else base)
    with raises(
        PlanMismatchError, f"rank {odd} has options.exchange = 'relay', rank 0 has options.exchange = 'spread'"
    ):
        KcpContext(base, options=KcpOptions(exchange="relay" if rank == odd else "spread"))
    # What one rank alone cannot make is told to the others, which would wait for it.
    error = Exception if rank == odd else PlanMismatchError
    with raises(error, "exchange='ring'", same=False):
        KcpContext(base, options=KcpOptions(exchange="ring" if rank == odd else "auto"))
    with raises(error, "timeout=None", same=False):
        KcpContext(base, timeout=None if rank == odd else 60.0)
    with raises(PlanMismatchError, f"the partition is for {world + 1} ranks, the group has {world}"):
        KcpContext(others["world_size"])


def knobs_that_differ_get_the_same_error(rank: int, world: int) -> None:
    odd, base = world - 1, Partition.contiguous([0, 10, 24], world)
    for name, value, others in (
        ("BACKWARD", "replay", "saved"),
        ("CHECKPOINT_TOKENS", 128, 512),
        ("FAMILY", "cpu", None),
        ("TRANSFER_WALK", "bf16x3", "default"),
    ):
        knob = f"CAKE_KDA_JIT_{name}"
        field = f"options.{name.lower()} ({knob})"
        with pytest.MonkeyPatch.context() as patch:
            if rank == odd:
                patch.setenv(knob, str(value))
            with raises(
                PlanMismatchError, f"rank {odd} has {field} = {value!r}, rank 0 has {field} = {others!r}; give"
            ):
                KcpContext(base)
            # What one rank has of its environment, others may have of an argument.
            options = None if rank == odd else KcpOptions(**{name.lower(): value})
            if name != "FAMILY":
                KcpContext(base, options=options)
                continue
            # Convolutions have no such argument.
            with raises(PlanMismatchError, f"rank {odd} has {knob} = 'cpu', rank 0 has {knob} = None; give"):
                KcpContext(base, options=options)


def first_calls_that_differ_get_the_same_error(rank: int, world: int) -> None:
    partition = Partition.contiguous([0, 10 * world], world)
    ctx = KcpContext(partition)
    dtype = torch.bfloat16 if rank else torch.float32
    problem = problem_of(partition, dtype=dtype, with_state=False)
    with raises(PlanMismatchError, "rank 1 has dtype = 'bf16', rank 0 has dtype = 'fp32'"):
        chunk_kda(*(partition.shard(problem.inputs[name], rank) for name in NAMES), cp_context=ctx)


# ---- failures: each in a group of its own ----------------------------------------------------------------------------


def a_late_rank_is_an_error_on_all(rank: int, world: int) -> None:
    partition, short = Partition.contiguous([0, 100], world), short_timeout(world)
    ctx = KcpContext(partition, dist.new_group(), timeout=short)
    problem = problem_of(partition, with_state=False)
    inputs = [partition.shard(problem.inputs[name], rank) for name in NAMES]
    chunk_kda(*inputs, cp_context=ctx, **problem.keywords)
    if rank == 0:
        time.sleep(2 * short)
    # Every rank waits for the one before it, and rank 0 finds them gone.
    with raises(CommunicationError, f"rank {rank} of {world}", f"timeout={short} s", within=4 * short, same=False):
        for _ in range(2):
            attention_of_rank(problem, ctx)


def other_calls_are_an_error_on_all(rank: int, world: int) -> None:
    partition, short = Partition.zigzag([0, 100], world), short_timeout(world)
    ctx = KcpContext(partition, dist.new_group(), timeout=short)
    problem = problem_of(partition, with_state=False)
    inputs = [partition.shard(problem.inputs[name], rank) for name in NAMES]
    chunk_kda(*inputs, cp_context=ctx, **problem.keywords)
    with raises(CommunicationError, "made other calls", within=4 * short, same=False):
        if rank:
            chunk_kda(*inputs, cp_context=ctx, **problem.keywords)
        else:
            causal_conv1d(inputs[0].flatten(2), torch.ones(128, 4), cp_context=ctx)


def another_number_of_channels_is_an_error_on_all(rank: int, world: int) -> None:
    partition, short = Partition.zigzag([0, 100], world), short_timeout(world)
    ctx = KcpContext(partition, dist.new_group(), timeout=short)
    channels = 8 + rank
    with raises(CommunicationError, "made other calls", within=4 * short, same=False):
        causal_conv1d(
            torch.zeros(1, partition.num_local_tokens(rank), channels), torch.ones(channels, 4), cp_context=ctx
        )


def a_rank_that_makes_no_context_in_time_is_an_error_on_all(rank: int, world: int) -> None:
    """Rank 0 tells the others who is missing; nobody tells them if it is rank 0."""
    short = short_timeout(world)
    for late in (world - 1, 0):
        group = dist.new_group()
        if rank == late:
            time.sleep(2 * short + 1.5)  # a FileStore counts whole seconds
        told = "rank 0" if late == 0 else f"ranks [{late}] did not take part in time"
        with raises(CommunicationError, told, within=4 * short, same=False):
            KcpContext(Partition.contiguous([0, 10], world), group, timeout=short)
        dist.barrier()


def a_dead_rank_is_an_error_on_the_others(rank: int, world: int) -> None:
    partition = Partition.zigzag([0, 100], world)
    ctx = KcpContext(partition, timeout=10.0)
    problem = problem_of(partition)
    attention_of_rank(problem, ctx)
    if rank == world - 1:
        os._exit(0)
    with raises(CommunicationError, "a peer ended", within=8.0, same=False):
        for _ in range(3):
            attention_of_rank(problem, ctx)
    short = short_timeout(world)
    with raises(CommunicationError, f"ranks [{world - 1}] did not take part in time", within=4 * short, same=False):
        KcpContext(partition, timeout=short)


CHECKS = (
    every_layout_and_exchange_has_the_bits_of_virtual_ranks,
    the_convolution_has_the_bits_of_virtual_ranks,
    three_convolutions_share_an_exchange,
    contexts_of_several_packs_may_alternate,
    gather_gives_the_whole_and_sums_its_gradients,
    a_sub_group_translates_its_ranks,
    parameter_gradients_are_those_of_one_rank_after_one_reduction,
    missing_gradients_count_as_0,
    a_rank_that_owns_nothing_has_zero_gradients,
    ranks_that_differ_get_the_same_error,
    knobs_that_differ_get_the_same_error,
    first_calls_that_differ_get_the_same_error,
    a_late_rank_is_an_error_on_all,
    other_calls_are_an_error_on_all,
    another_number_of_channels_is_an_error_on_all,
    a_rank_that_makes_no_context_in_time_is_an_error_on_all,
    a_dead_rank_is_an_error_on_the_others,
)


def run_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    for check in CHECKS:
        failure = ""
        try:
            check(rank, world)
        except Exception:  # noqa: BLE001 - told by the test
            failure = traceback.format_exc()
        Path(folder, f"{check.__name__}.{rank}").write_text(failure)
        if check is not CHECKS[-1]:
            dist.barrier()
    os._exit(0)  # the group has lost a rank: nothing to take leave of


def main(world: int) -> dict[str, dict[int, str]]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=run_rank, args=(rank, world, folder)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            process.kill()
        found: dict[str, dict[int, str]] = {}
        for check in CHECKS:
            ranks = range(world - 1 if check is CHECKS[-1] else world)
            texts = {rank: Path(folder, f"{check.__name__}.{rank}") for rank in ranks}
            told = {rank: path.read_text() if path.exists() else "did not end" for rank, path in texts.items()}
            found[check.__name__] = {rank: text for rank, text in told.items() if text}
        return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
