"""``bench cp --real`` under torchrun: each process is a rank, over NCCL on a device of its own.

On the CPU, and where processes must share a device, they talk through gloo: that shows that it works, and no speed.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import product

import torch
import torch.distributed as dist

from ..cp.context import KcpContext
from ..runtime.load import loaded_kernels
from . import cp_cases as cases
from .cp_tables import Table, described, lines_of, summary_table
from .cp_timing import (
    EXCHANGE,
    HostClock,
    Key,
    RankTimes,
    exchange_all,
    first_run,
    make_clock,
    measure_alone,
    measure_whole,
    row_of,
    time_in_turn,
    warm_up,
)
from .cp_work import LoopbackGroup, Message, ModuleInputs, RankWork, make_inputs, take_arm

OWN = "Ranks with a device each"
SHARED = "Ranks that share a device"
FIRST = ("first step", "default walk")
TIMEOUT = timedelta(seconds=300)
"""A rank that compiles kernels, or times a pack on its own, keeps the others waiting."""
PAUSE_CYCLES = 2_000_000
"""The device sleeps a millisecond before ranks meet, so that the host is a little ahead of it."""


class MeetingClock:
    """Times work on CUDA devices from the moment when all ranks have met on theirs.

    The host waits for every exchange, as it does in a training step: its time is in the result.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self._flag, self._group = torch.zeros(1, device=device), group
        # Ranks connect in their first sum: none may load a kernel behind it before all have.
        dist.all_reduce(self._flag, group=group)
        torch.cuda.synchronize(device)

    def start(self, key: Key, run: Callable[[], object], host: float) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Run once; returns its events."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(PAUSE_CYCLES)
        dist.all_reduce(self._flag, group=self._group)
        first.record()
        run()
        last.record()
        return first, last

    def milliseconds(self, key: Key, spans: list) -> list[float]:
        """Wait for the runs of a key; returns their times."""
        spans[-1][1].synchronize()
        return [first.elapsed_time(last) for first, last in spans]


class MeetingHostClock(HostClock):
    """Times work on CPUs from the moment when all ranks have met."""

    def start(self, key: Key, run: Callable[[], object], host: float) -> float:
        """Run once; returns milliseconds."""
        meet()
        return super().start(key, run, host)


def meet() -> None:
    """Wait for all ranks, on the host."""
    dist.all_reduce(torch.zeros(1))


@contextmanager
def joined_group(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """Join the other processes of torchrun, and leave them at the end; gives the group that carries the exchanges."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    yield dist.group.WORLD if has_own_device(device) else dist.new_group(backend="gloo", timeout=TIMEOUT)
    meet()
    # Not after an error: NCCL waits for all ranks to leave, and what went wrong would never be told.
    dist.destroy_process_group()


def has_own_device(device: torch.device) -> bool:
    """Whether every rank has a CUDA device to itself."""
    return device.type == "cuda" and dist.get_world_size() <= torch.cuda.device_count()


def device_of_process(name: str | None) -> torch.device:
    """Return this process's device, one of its own where there are enough, and make it the current one."""
    kind = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu")).type
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device(kind, dist.get_node_local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@dataclass(frozen=True)
class Run:
    """What all units share: sizes, this rank's inputs, the group that carries exchanges, and the command's options."""

    sizes: cases.Sizes
    inputs: ModuleInputs
    group: dist.ProcessGroup
    options: argparse.Namespace

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.inputs.g.device

    def context(self, unit: cases.Unit) -> KcpContext:
        """Return this rank's context of a unit; collective."""
        return KcpContext(
            self.sizes.partition(unit), self.group, options=self.sizes.options, timeout=TIMEOUT.total_seconds()
        )


def time_together(run: Run, ctx: KcpContext, messages: dict[str, list[Message]]) -> RankTimes:
    """Return the times of this rank while all ranks do theirs: arms in turn, and exchanges with nothing beside them."""
    work = RankWork(run.inputs, ctx.num_local_tokens, cp_context=ctx)

    def do(boundary: str, arm: str) -> None:
        take_arm(ctx, arm)
        work.of(boundary)()

    works: dict[Key, Callable[[], object]] = {}
    for boundary in cases.BOUNDARIES:
        works |= {(boundary, arm): partial(do, boundary, arm) for arm in run.options.arms}
        works[boundary, EXCHANGE] = partial(exchange_all, ctx, messages[boundary], run.device)
    clock = MeetingClock(run.device, run.group) if run.device.type == "cuda" else MeetingHostClock()
    host = first_run(work, run.device)
    meet()
    times = time_in_turn(works, run.options.runs, clock, host)
    ctx.channel.settle()
    return RankTimes(times, messages)


def measure_unit(run: Run, unit: cases.Unit) -> list[cases.CpRow]:
    """Return a unit's rows, the same on all ranks. Each rank's work is timed without the others as well."""
    clock, arms = make_clock(run.device), run.options.arms
    clock.begin(unit)
    loopback = KcpContext(run.sizes.partition(unit), LoopbackGroup(unit.ranks), options=run.sizes.options)
    alone = measure_alone(loopback.of_rank(dist.get_rank()), run.inputs, arms, run.options.runs, clock)
    together = time_together(run, run.context(unit), alone.messages)
    found: list = [None] * unit.ranks
    dist.all_gather_object(found, (together, alone))
    ranks, others = zip(*found)
    engine = "nccl" if has_own_device(run.device) else "gloo"
    rows = []
    for boundary, arm in product(cases.BOUNDARIES, arms):
        alone_ms = max(other.median(boundary, arm) for other in others)
        rows.append(row_of(unit, run.sizes, (boundary, arm), ranks, engine=engine, alone_ms=alone_ms))
    return rows


def first_step_row(run: Run, unit: cases.Unit, began: float) -> cases.CpRow:
    """Run a step, the first of all ranks; returns the time since ``began`` of the rank that ends it last, as a row."""
    ctx = run.context(unit)
    first_run(RankWork(run.inputs, ctx.num_local_tokens, cp_context=ctx), run.device)
    ctx.channel.settle()
    found: list = [None] * unit.ranks
    dist.all_gather_object(found, RankTimes({FIRST: [1e3 * (time.perf_counter() - began)]}))
    origins = Counter(kernel.origin for kernel in loaded_kernels())
    engine = "kernels: " + ", ".join(f"{count} {origin}" for origin, count in sorted(origins.items()))
    return row_of(unit, run.sizes, FIRST, found, engine=engine)


def measure_one_device(unit: cases.Unit, sizes: cases.Sizes, device: torch.device, runs: int) -> list[cases.CpRow]:
    """Return the rows of the pack on rank 0's device, the same on all ranks, which wait for them."""
    found: list = [None]
    if dist.get_rank() == 0:
        inputs = make_inputs(sizes.most_tokens([unit]), sizes.heads, sizes.head_dim, device)
        found = [measure_whole(unit, sizes, inputs, runs, make_clock(device))]
        del inputs
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.broadcast_object_list(found, 0)
    return found[0]


def measure_real(sizes: cases.Sizes, options: argparse.Namespace) -> int:
    """Measure what is not in the table yet: the pack on one device, and on all ranks. Rank 0 writes and tells."""
    began = time.perf_counter()
    device = device_of_process(options.device)
    with joined_group(device) as group:
        size, is_first = dist.get_world_size(), dist.get_rank() == 0
        what = f"{OWN if has_own_device(device) else SHARED}, {sizes.name}"
        table = Table((options.json or options.resume) if is_first else None, device, what)
        if options.resume is not None:
            table.take_over(options.resume)
        numbers = [one for one in (1, size) if one in (options.cp or (1, size))]
        units = cases.units_in_order(options.packs, numbers, options.layouts, options.sessions)
        units = [unit for unit in units if unit.key not in table.done]
        together = [unit for unit in units if unit.ranks == size]
        if together:
            tokens = sizes.most_tokens(together)
            inputs = make_inputs(tokens, sizes.heads, sizes.head_dim, device, dist.get_rank())
            run = Run(sizes, inputs, group, options)
            first = first_step_row(run, together[0], began)
            table.add([first])
            if is_first:
                print(f"first step after {1e-3 * first.ms.median:.1f} s; {first.engine}", flush=True)
            warm_up(sizes, inputs, options.arms)
        for unit in units:
            rows = measure_one_device(unit, sizes, device, options.runs) if unit.ranks == 1 else measure_unit(run, unit)
            table.add(rows)
            if is_first:
                print(described(rows), flush=True)
        if is_first:
            print(f"\n{summary_table(lines_of(table.rows))}")
    return 0
