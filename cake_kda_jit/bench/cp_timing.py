"""The times of ranks in ``bench cp``: of virtual ones, each alone on the device, free of the host's time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ..cp.context import KcpContext
from ..cp.partition import Partition
from ..ops.plan import make_plan
from ..ops.problem import KdaOptions
from .core import Times
from .cp_cases import BOUNDARIES, CpRow, Sizes, Unit
from .cp_work import LoopbackGroup, Message, ModuleInputs, RankWork, take_arm

EXCHANGE = "exchange"
"""The arm that does a rank's exchanges and nothing else."""
WHOLE = "whole"
"""The arm of a pack on one device."""
CYCLES_PER_SECOND = 2e9
"""Of a device that sleeps; where its clock is slower it sleeps longer, which does no harm."""
MARGIN = 1.4
"""The device sleeps for so many times what handing a run over took before."""
SHORTEST_PAUSE = 2e-5
ATTEMPTS = 4

Key = tuple[str, str]
"""(boundary, arm)."""


class PacedClock:
    """Times work on a CUDA device by events, and hands it over before the device gets to it.

    One of 16 ranks has little to do: the device would wait for the host. So it sleeps before a run, as long as the host
    takes to hand the run over, less what the device still has to do by then.
    """

    def __init__(self) -> None:
        self._host: dict[tuple, float] = {}
        self.begin(None)

    def begin(self, unit: Unit | None) -> None:
        """Begin a unit: runs take other times than before; the host's are known where there were as many ranks."""
        self._size = None if unit is None else unit.ranks
        self._device: dict[Key, float] = {}
        self._free_at = 0.0
        self._ahead: list[bool] = []

    @property
    def ahead(self) -> float:
        """The share of the unit's runs that were handed over before the device began with them."""
        return sum(self._ahead) / len(self._ahead)

    def start(self, key: Key, run: Callable[[], object], host: float) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Hand a run over; returns its events. ``host`` is a guess, in seconds, for the first run of its kind.

        A run that the device began too early is handed over again.
        """
        for _ in range(ATTEMPTS):
            events, is_ahead = self._attempt(key, run, host)
            if is_ahead:
                break
        self._ahead.append(is_ahead)
        return events

    def _attempt(self, key: Key, run: Callable[[], object], host: float) -> tuple[tuple, bool]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        kind = (self._size, *key)
        known = self._host.get(kind, host)
        began = time.perf_counter()
        pause = max(SHORTEST_PAUSE, MARGIN * known - max(0.0, self._free_at - began))
        torch.cuda._sleep(int(pause * CYCLES_PER_SECOND))
        first.record()
        run()
        is_ahead = not first.query()
        last.record()
        spent = time.perf_counter() - began
        # A host that is far ahead waits for a place in the queue, and is no slower for that.
        self._host[kind] = min(known, spent) if is_ahead else max(known, spent)
        self._free_at = max(began, self._free_at) + pause + self._device.get(key, 0.0)
        return (first, last), is_ahead

    def milliseconds(self, key: Key, spans: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        """Wait for the runs of a key; returns their times."""
        spans[-1][1].synchronize()
        found = [first.elapsed_time(last) for first, last in spans]
        # A little less: the device may not be thought busy when it is not.
        self._device[key] = 0.9e-3 * min(found)
        return found


class HostClock:
    """Times work on a CPU; nothing is handed over."""

    ahead = 1.0

    def begin(self, unit: Unit | None) -> None:
        """See PacedClock."""

    def start(self, key: Key, run: Callable[[], object], host: float) -> float:
        """Run once; returns milliseconds."""
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)

    def milliseconds(self, key: Key, spans: Sequence[float]) -> list[float]:
        """Return what ``start`` found."""
        return list(spans)


Clock = PacedClock | HostClock


def make_clock(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return PacedClock() if device.type == "cuda" else HostClock()


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class RankTimes:
    """Milliseconds of one rank by (boundary, arm), the exchange among the arms, and messages by boundary."""

    ms: dict[Key, list[float]] = field(default_factory=dict)
    messages: dict[str, list[Message]] = field(default_factory=dict)

    def median(self, boundary: str, arm: str) -> float:
        """Return the median of one arm's times; 0 for exchanges where there are none."""
        times = self.ms.get((boundary, arm), [])
        return statistics.median(times) if times else 0.0

    def received_bytes(self, boundary: str) -> int:
        """Return what the rank receives in all."""
        return sum(sum(message.receives.values()) for message in self.messages.get(boundary, ()))


def time_in_turn(
    works: dict[Key, Callable[[], object]], runs: int, clock: Clock, host: float
) -> dict[Key, list[float]]:
    """Return the milliseconds of each work, all of them in turn, ``runs`` times over; ``host`` as in the clock."""
    spans: dict[Key, list] = {key: [] for key in works}
    for _ in range(runs):
        for key, work in works.items():
            spans[key].append(clock.start(key, work, host))
    return {key: clock.milliseconds(key, some) for key, some in spans.items()}


def first_run(work: RankWork, device: torch.device) -> float:
    """Run a step, which makes tables and finds memory for all that follows; returns the host's seconds."""
    began = time.perf_counter()
    work.step()
    host = time.perf_counter() - began
    synchronize(device)
    return host


def measure_alone(ctx: KcpContext, inputs: ModuleInputs, arms: Sequence[str], runs: int, clock: Clock) -> RankTimes:
    """Return the times of a rank of a LoopbackGroup: arms in turn, and its exchanges alone."""
    work, device, log = RankWork(inputs, ctx.num_local_tokens, cp_context=ctx), inputs.g.device, ctx.channel.log
    found = RankTimes()

    def run(boundary: str, arm: str) -> None:
        log.clear()
        take_arm(ctx, arm)
        work.of(boundary)()
        found.messages[boundary] = list(log)

    works: dict[Key, Callable[[], object]] = {}
    for boundary in BOUNDARIES:
        works |= {(boundary, arm): partial(run, boundary, arm) for arm in arms}
        works[boundary, EXCHANGE] = lambda boundary=boundary: exchange_all(ctx, found.messages[boundary], device)
    found.ms = time_in_turn(works, runs, clock, first_run(work, device))
    return found


def exchange_all(ctx: KcpContext, messages: Sequence[Message], device: torch.device) -> None:
    """Do a rank's exchanges with nothing beside them."""
    for message in messages:
        message.start(ctx.channel, ctx.next_label(EXCHANGE), device).wait()


def measure_whole(unit: Unit, sizes: Sizes, inputs: ModuleInputs, runs: int, clock: Clock) -> list[CpRow]:
    """Return the rows of the pack on one device, without a context."""
    boundaries = sizes.partition(unit).cu_seqlens
    plan = make_plan(torch.tensor(boundaries), num_heads=sizes.heads, head_dim=sizes.head_dim, device=inputs.g.device)
    work = RankWork(
        inputs, boundaries[-1], options=KdaOptions("replay", workspace_limit=sizes.workspace_limit), plan=plan
    )
    works = {(boundary, WHOLE): work.of(boundary) for boundary in BOUNDARIES}
    clock.begin(unit)
    ms = time_in_turn(works, runs, clock, first_run(work, inputs.g.device))
    return [row_of(unit, sizes, key, [RankTimes(ms)], engine="one device", ahead=clock.ahead) for key in works]


def measure_virtual(
    unit: Unit, sizes: Sizes, inputs: ModuleInputs, arms: Sequence[str], runs: int, clock: Clock
) -> list[CpRow]:
    """Return a unit's rows, from all its ranks, each timed alone."""
    if unit.ranks == 1:
        return measure_whole(unit, sizes, inputs, runs, clock)
    whole = KcpContext(sizes.partition(unit), LoopbackGroup(unit.ranks), options=sizes.options)
    clock.begin(unit)
    ranks = [measure_alone(whole.of_rank(rank), inputs, arms, runs, clock) for rank in range(unit.ranks)]
    keys = [(boundary, arm) for boundary in BOUNDARIES for arm in arms]
    return [row_of(unit, sizes, key, ranks, engine="virtual ranks", ahead=clock.ahead) for key in keys]


def row_of(unit: Unit, sizes: Sizes, key: Key, ranks: Sequence[RankTimes], **others: object) -> CpRow:
    """Return the row of a boundary and an arm: that of the rank whose median is the largest."""
    boundary, arm = key
    medians = [one.median(boundary, arm) for one in ranks]
    slowest = ranks[medians.index(max(medians))]
    times, lengths = slowest.ms[key], sizes.lengths(unit.pack)
    return CpRow(
        case=f"{unit.name}, {boundary}",
        arm=arm,
        ms=Times(max(medians), min(times), max(times), len(times)),
        bytes=max(one.received_bytes(boundary) for one in ranks),
        pack=unit.pack,
        tokens=sum(lengths),
        documents=len(lengths),
        heads=sizes.heads,
        cp=unit.ranks,
        layout=unit.layout,
        boundary=boundary,
        session=unit.session,
        rank_ms=tuple(round(median, 4) for median in medians),
        exchange_ms=slowest.median(boundary, EXCHANGE),
        **others,
    )


def warm_up(sizes: Sizes, inputs: ModuleInputs, arms: Sequence[str]) -> None:
    """Load every kernel that the units launch: both boundaries and all arms on a short pack."""
    tokens = min(512, inputs.g.shape[1])
    partition = Partition.contiguous([0, 4 * tokens], 4)
    ctx = KcpContext(partition, LoopbackGroup(4), options=sizes.options).of_rank(1)
    work = RankWork(inputs, tokens, cp_context=ctx)
    for arm in arms:
        take_arm(ctx, arm)
        work.forward()
        work.step()
    synchronize(inputs.g.device)
