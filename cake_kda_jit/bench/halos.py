"""What halos cost ranks that share a pack: three exchanges or one, and with nothing done while it is under way.

Run ``torchrun --nproc_per_node N -m cake_kda_jit.bench halos [--json FILE]``: Q1, each process a rank, as in
``bench cp --real``. Arms run in turn, from the moment when all ranks have met.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from ..cp.channel import Channel, Exchange
from ..cp.context import KcpContext
from ..cp.partition import Partition
from ..ops.api import causal_conv1d
from . import cp_cases as cases
from .core import Row, Times, print_table, write_report
from .cp_real import TIMEOUT, MeetingClock, MeetingHostClock, device_of_process, has_own_device, joined_group, meet
from .cp_timing import Key, synchronize, time_in_turn
from .cp_work import LoopbackGroup, ModuleInputs, RankWork, make_inputs

WORKS = ("convolutions", "convolutions, step", "forward", "step")
"""Three convolutions, and the module that is B1 and B3 of ``bench cp``."""
EACH, ONE, AT_ONCE = "an exchange each", "one exchange", "one, waited for at once"
PACK = "Q1"


class HaloWork(RankWork):
    """A rank's module in the form of an arm."""

    def __init__(self, inputs: ModuleInputs, ctx: KcpContext, arm: str) -> None:
        super().__init__(inputs, ctx.num_local_tokens, cp_context=ctx)
        self._ctx, self._arm, self._channel = ctx, arm, ctx.channel

    def convolutions(self) -> tuple[torch.Tensor, ...]:
        """See RankWork."""
        if self._arm != EACH:
            return super().convolutions()
        pairs = zip(self._projected, self._weights)
        return tuple(causal_conv1d(x, weight, cp_context=self._ctx)[0] for x, weight in pairs)

    def run(self, work: str) -> object:
        """Do one of ``WORKS``."""
        # The context takes another end of the same group for this run: there is no option to hide nothing.
        self._ctx._channel = WaitingChannel(self._channel) if self._arm == AT_ONCE else self._channel
        try:
            if work == "convolutions":
                with torch.no_grad():
                    return self.convolutions()
            if work == "convolutions, step":
                outputs = self.convolutions()
                leaves = [*self._projected, *self._weights]
                return torch.autograd.grad(outputs, leaves, [self._do.flatten(2)] * len(outputs))
            return self.forward() if work == "forward" else self.step()
        finally:
            self._ctx._channel = self._channel


class WaitingChannel(Channel):
    """Another channel, whose convolutions' exchanges are over when they have been started."""

    def __init__(self, inner: Channel) -> None:
        super().__init__(inner.rank, inner.world_size)
        self._inner = inner

    def prepare(self, device: torch.device) -> None:
        """See Channel."""
        self._inner.prepare(device)

    def _start(self, sends, receives, label) -> Exchange:
        exchange = self._inner.start(sends, receives, label)
        if "conv" not in label:
            return exchange
        exchange.wait()
        return Over()

    def _judge(self, topic: str, fields: dict[str, str]) -> tuple[int, str | None]:
        return self._inner._judge(topic, fields)


class Over(Exchange):
    """An exchange that has been waited for."""

    def wait(self) -> None:
        """See Exchange."""


def warm_up(sizes: cases.Sizes, inputs: ModuleInputs) -> None:
    """Load every kernel, without a peer that would wait meanwhile."""
    tokens = min(512, inputs.g.shape[1])
    ctx = KcpContext(Partition.contiguous([0, 4 * tokens], 4), LoopbackGroup(4), options=sizes.options).of_rank(1)
    for arm, work in product((EACH, ONE), WORKS):
        HaloWork(inputs, ctx, arm).run(work)
    synchronize(inputs.g.device)


def measure_unit(
    unit: cases.Unit, sizes: cases.Sizes, inputs: ModuleInputs, group: dist.ProcessGroup, runs: int
) -> list[Row]:
    """Return a layout's rows, the same on all ranks: of each run the time of the rank that took longest."""
    device = inputs.g.device
    ctx = KcpContext(sizes.partition(unit), group, options=sizes.options, timeout=TIMEOUT.total_seconds())
    works: dict[Key, Callable[[], object]] = {}
    for work, arm in product(WORKS, (EACH, ONE, AT_ONCE)):
        works[work, arm] = partial(HaloWork(inputs, ctx, arm).run, work)
    for run in works.values():
        run()
    ctx.channel.settle()
    meet()
    clock = MeetingClock(device, group) if device.type == "cuda" else MeetingHostClock()
    found: list = [None] * unit.ranks
    dist.all_gather_object(found, time_in_turn(works, runs, clock, host=0.0))
    ctx.channel.settle()
    rows = []
    for work, arm in works:
        slowest = [max(times) for times in zip(*(one[work, arm] for one in found))]
        ms = Times(statistics.median(slowest), min(slowest), max(slowest), runs)
        rows.append(Row(f"{unit.name}, {work}", arm, "nccl" if has_own_device(device) else "gloo", ms))
    return rows


def main(argv: list[str]) -> int:
    """Measure, and write what was found; returns 0."""
    parser = argparse.ArgumentParser(prog="cake-kda-jit bench halos", description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=cases.LAYOUTS, default=list(cases.LAYOUTS))
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=cases.HEAD_DIM)
    parser.add_argument("--tokens", type=int, help="shorten the pack to so many tokens")
    parser.add_argument("--workspace-limit", type=float, metavar="BYTES", help="as in KdaOptions")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(argv)
    limit = None if options.workspace_limit is None else int(options.workspace_limit)
    sizes = cases.Sizes(options.heads, options.head_dim, options.tokens, limit)
    device = device_of_process(options.device)
    with joined_group(device) as group:
        units = [cases.Unit(PACK, dist.get_world_size(), layout, 1) for layout in options.layouts]
        inputs = make_inputs(sizes.most_tokens(units), sizes.heads, sizes.head_dim, device, dist.get_rank())
        warm_up(sizes, inputs)
        rows = [row for unit in units for row in measure_unit(unit, sizes, inputs, group, options.runs)]
        if dist.get_rank() == 0:
            cells = [(row.case, row.arm, f"{row.ms.median:.3f}", f"{row.ms.min:.3f}") for row in rows]
            print_table(("case", "arm", "ms", "fastest"), cells)
            if options.json is not None:
                what = f"Halos of three convolutions, {sizes.name}"
                write_report(options.json, what, "cake_kda_jit.bench halos", device, rows)
    return 0
