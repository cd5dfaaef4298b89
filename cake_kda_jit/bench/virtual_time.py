"""What context parallelism adds to the work: the time of all virtual ranks together, over that of one device.

Run ``python -m cake_kda_jit.bench virtual_time [--device cuda] [--json FILE]``. One rank runs at a time, and its time
ends with its device's work, so the sum holds what ranks wait for their own hosts as well. Runs of all arms in turn.

Ranks are threads, and the host runs each on a core whose caches went cold while it waited for another. With
``--one-core`` they take turns on one core, where what they run stays in the caches, as it does on the core of a rank
that has a process of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..cp.context import KcpContext
from ..cp.options import KcpOptions
from ..cp.partition import Partition
from ..cp.virtual import VirtualGroup, run_virtual
from ..ops.api import chunk_kda
from ..ops.plan import make_plan
from ..ops.problem import KdaOptions
from .core import Row, Times, print_table, write_report
from .cp_cases import HEAD_DIM, LAYOUTS, PACKS, Sizes
from .problems import NAMES
from .virtual_ranks import Pack, make_pack

HEADS = 32
RANKS = 4
RUNS = 7
ONE_DEVICE = "one device"


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def step(pack: Pack, part: Callable[[Tensor], Tensor] = _whole) -> Callable[..., None]:
    """Return a forward and backward of the tokens that ``part`` takes; its argument says whether there is a backward.

    Gates bounded by -5, no states: what the bench of speed runs.
    """
    keywords = {name: value for name, value in pack.problem.keywords.items() if name != "initial_state"}
    leaves = {name: part(tensor).detach().requires_grad_() for name, tensor in pack.problem.inputs.items()}
    do = part(pack.do)

    def run(has_backward: bool, **where: object) -> None:
        with torch.set_grad_enabled(has_backward):
            o, _ = chunk_kda(*(leaves[name] for name in NAMES), lower_bound=-5.0, **keywords, **where)
        if has_backward:
            torch.autograd.grad(o, list(leaves.values()), do)

    return run


Arm = Callable[[bool, int | None], list[float]]
"""A run with a backward or without, ranks on one core or wherever: seconds."""


def arm_of_ranks(pack: Pack, layout: str, ranks: int, limits: dict[str, object]) -> Arm:
    """Return a run of virtual ranks: their seconds."""
    partition = getattr(Partition, layout)(pack.boundaries, ranks)
    ctx = KcpContext(partition, VirtualGroup(ranks), options=KcpOptions(**limits))
    steps = [step(pack, partial(partition.shard, rank=rank)) for rank in range(ranks)]

    def run(has_backward: bool, core: int | None) -> list[float]:
        def work(rank: int, own: KcpContext) -> None:
            if core is not None:
                os.sched_setaffinity(0, {core})  # of the rank's thread, which ends with the run
            steps[rank](has_backward, cp_context=own)

        return run_virtual(ctx, work).seconds

    return run


def arm_of_one_device(pack: Pack, limits: dict[str, object]) -> Arm:
    """Return a run without ranks, by the same clock and on its own thread's core: its seconds."""
    heads, head_dim = pack.do.shape[2:]
    plan = make_plan(pack.problem.cu_seqlens, num_heads=heads, head_dim=head_dim, device=pack.do.device)
    whole, options = step(pack), KdaOptions(**limits)
    finish = torch.cuda.synchronize if pack.do.is_cuda else lambda: None

    def run(has_backward: bool, _core: int | None) -> list[float]:
        finish()
        began = time.perf_counter()
        whole(has_backward, plan=plan, options=options)
        finish()
        return [time.perf_counter() - began]

    return run


def rows_of(
    pack: Pack, name: str, ranks: int, runs: int, limits: dict[str, object], core: int | None = None
) -> list[Row]:
    """Return the total time of every arm, forward and forward + backward; ranks on a core, None for any."""
    arms = {ONE_DEVICE: arm_of_one_device(pack, limits)}
    arms |= {layout: arm_of_ranks(pack, layout, ranks, limits) for layout in LAYOUTS}
    rows = []
    for what, has_backward in (("forward", False), ("forward + backward", True)):
        found: dict[str, list[float]] = {arm: [] for arm in arms}
        for number in range(2 + runs):
            for arm, run in arms.items():
                # A first run may compile, on all cores.
                total = 1e3 * sum(run(has_backward, core if number else None))
                if number > 1:
                    found[arm].append(total)
        for arm, times in found.items():
            ms = Times(statistics.median(times), min(times), max(times), len(times))
            rows.append(Row(f"{name}, CP {ranks}, {what}", arm, "cake_kda_jit", ms))
    return rows


def print_rows(what: str, rows: Sequence[Row]) -> None:
    """Print the times, each over that of one device."""
    alone = {row.case: row.ms.median for row in rows if row.arm == ONE_DEVICE}
    lines = [[row.case, row.arm, f"{row.ms.median:.2f}", f"{row.ms.median / alone[row.case]:.3f}"] for row in rows]
    print(f"{what}.\n")
    print_table(["case", "arm", "median of all ranks together, ms", "over one device"], lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="cake-kda-jit bench virtual_time", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pack", default="Q1", choices=list(PACKS))
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--head-dim", type=int, default=HEAD_DIM, choices=(64, 128))
    parser.add_argument("--tokens", type=int, help="scale the pack to so many; default: as published")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--backward", default="saved", choices=("saved", "replay"))
    parser.add_argument(
        "--one-core", action="store_true", help="run the ranks' threads on one core of the host (Linux)"
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(argv)
    if options.one_core and not hasattr(os, "sched_setaffinity"):
        parser.error("--one-core: this system cannot keep a thread on a core")
    device = torch.device(options.device)
    lengths = Sizes(options.heads, options.head_dim, options.tokens).lengths(options.pack)
    pack = make_pack(lengths, heads=options.heads, head_dim=options.head_dim, device=device)
    limits = {"backward": options.backward}
    core = max(os.sched_getaffinity(0)) if options.one_core else None
    rows = rows_of(pack, options.pack, options.ranks, options.runs, limits, core)
    what = (
        f"chunk_kda of {sum(lengths)} tokens, H = {options.heads}, K = V = {options.head_dim}, bf16, "
        f"{options.backward}: virtual ranks together"
    )
    what += " on one core of the host" if options.one_core else ""
    print_rows(what, rows)
    if options.json:
        write_report(options.json, what, "cake_kda_jit.bench.virtual_time", device, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
