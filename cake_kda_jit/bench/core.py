"""Time several arms fairly and write what was found: interleaved runs, medians, inputs larger than the cache.

An arm is one way to do the same work. All arms of a case run in turn, once each, ``runs`` times over, so that a change
of the machine's clocks meets all of them.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ..paths import data_dir

FLUSH_BYTES = 256 << 20
"""Written before a run that must find nothing in the L2 cache: several times the 50 MB of an H200."""


@dataclass(frozen=True)
class Arm:
    """One way to do a case's work: ``run`` launches it, ``engine`` says which implementation really ran.

    ``bytes`` is the memory traffic that it states, 0 if it states none; ``error`` its relative Frobenius error.
    """

    name: str
    engine: str
    run: Callable[[], object]
    bytes: int = 0
    error: float | None = None


@dataclass(frozen=True)
class Times:
    """Milliseconds over ``runs`` runs; of runs that were recorded elsewhere perhaps the median alone."""

    median: float
    min: float | None
    max: float | None
    runs: int


def measure(
    arms: Sequence[Arm], device: torch.device, *, warmup: int = 3, runs: int = 20, flush: bool = False
) -> dict[str, Times]:
    """Return each arm's times in milliseconds, runs interleaved.

    On CUDA by events around each run, elsewhere by the host's clock. ``flush`` empties the L2 cache before each run.
    """
    clock = _EventClock(device) if device.type == "cuda" else _HostClock()
    waste = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if flush else None
    for _ in range(warmup):
        for arm in arms:
            arm.run()
    found: dict[str, list] = {arm.name: [] for arm in arms}
    for _ in range(runs):
        for arm in arms:
            if waste is not None:
                waste.zero_()
            found[arm.name].append(clock.time(arm.run))
    return {name: _times([clock.milliseconds(one) for one in spans]) for name, spans in found.items()}


def _times(milliseconds: list[float]) -> Times:
    return Times(statistics.median(milliseconds), min(milliseconds), max(milliseconds), len(milliseconds))


class _HostClock:
    def time(self, run: Callable[[], object]) -> float:
        """Run once; returns milliseconds."""
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)

    def milliseconds(self, span: float) -> float:
        """Return what ``time`` found."""
        return span


class _EventClock:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def time(self, run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Launch once; returns the events before and behind it, not yet waited for."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The device must not run dry between the first event and the launch: it is kept busy meanwhile.
        torch.cuda._sleep(200_000)
        first.record()
        run()
        last.record()
        return first, last

    def milliseconds(self, span: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
        """Wait for both events; returns the time between them."""
        span[1].synchronize()
        return span[0].elapsed_time(span[1])


@dataclass(frozen=True)
class Row:
    """One line of a report. ``bytes`` and ``error`` are None where they are not known."""

    case: str
    arm: str
    engine: str
    ms: Times
    bytes: int | None = None
    error: float | None = None


BANDWIDTH_HEADER = ("case", "arm", "ms", "TB/s", "of a copy's bandwidth")


def bandwidth_rows(case: str, arms: Sequence[Arm], times: dict[str, Times]) -> tuple[list[Row], list[list[str]]]:
    """Return the rows of arms that state their bytes, one of them a copy, and their lines of a printed table."""
    bandwidths = {arm.name: arm.bytes / times[arm.name].median for arm in arms}
    rows = [Row(case, arm.name, arm.engine, times[arm.name], arm.bytes) for arm in arms]
    lines = [
        [case, name, f"{times[name].median:.3f}", f"{found / 1e9:.2f}", f"{found / bandwidths['copy']:.0%}"]
        for name, found in bandwidths.items()
    ]
    return rows, lines


def machine(device: torch.device) -> dict[str, str]:
    """Return what a number depends on: device, driver, CUDA and torch versions."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else _processor(),
        "driver": _driver_version() if is_cuda else "none",
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
    }


def _driver_version() -> str:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text()) if path.exists() else None
    return found.group() if found else "unknown"


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{name}, {torch.get_num_threads()} threads"


def commit() -> str:
    """Return the checkout's commit, "unknown" outside one."""
    git = data_dir() / ".git"
    head = git / "HEAD"
    if not head.is_file():
        return "unknown"
    text = head.read_text().strip()
    reference = git / text.removeprefix("ref: ")
    if not text.startswith("ref: "):
        return text
    return reference.read_text().strip() if reference.is_file() else "unknown"


def make_report(what: str, script: str, device: torch.device, rows: Sequence[Any]) -> dict[str, Any]:
    """Return rows as ``docs/measurements/*.json`` hold them: schema 1, with machine, commit and date.

    A row is a ``Row`` or an instance of another dataclass.
    """
    return {
        "schema": 1,
        "what": what,
        "script": script,
        "commit": commit(),
        "date": str(date.today()),
        "machine": machine(device),
        "rows": [asdict(row) for row in rows],
    }


def write_report(path: Path, what: str, script: str, device: torch.device, rows: Sequence[Any]) -> None:
    """Write what ``make_report`` makes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(make_report(what, script, device, rows), indent=1) + "\n", encoding="utf-8")


def table_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, each line with its end."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print(table_text(header, rows), end="")
