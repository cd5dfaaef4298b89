"""How many compilations may run at a time: cores, memory and the container's limits decide."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .. import config

MEMORY_PER_JOB = 2 << 30
"""Bytes that one compilation may need: nvcc's peak on the largest program, rounded up."""

CGROUP = "/sys/fs/cgroup"
SELF_CGROUP = "/proc/self/cgroup"
MEMINFO = "/proc/meminfo"


def num_jobs(argument: int | None = None) -> int:
    """Return the argument, ``CAKE_KDA_JIT_JOBS``, ``MAX_JOBS``, or what cores and memory allow; at least 1."""
    asked = argument or config.read("JOBS") or config.read("MAX_JOBS")
    if asked:
        return asked
    return max(1, min(available_cores(), available_memory() // MEMORY_PER_JOB))


def available_cores() -> int:
    """Return the cores that this process may use, by its affinity and by its cgroup's quota."""
    found = [len(os.sched_getaffinity(0))]
    for directory in _cgroups("cpu"):
        words = " ".join(_lines(directory / "cpu.max")[:1]).split()
        legacy = [*_lines(directory / "cpu.cfs_quota_us")[:1], *_lines(directory / "cpu.cfs_period_us")[:1]]
        for quota in (words, legacy):
            if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
                found.append(max(1, int(quota[0]) // int(quota[1])))
    return min(found)


def available_memory() -> int:
    """Return the bytes of memory that this process may still use, by the machine and by its cgroups."""
    found = [int(line.split()[1]) << 10 for line in _lines(Path(MEMINFO)) if line.startswith("MemAvailable:")]
    for directory in _cgroups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            found += [int(line) for line in _lines(directory / name)[:1] if line.isdigit()]
    return min(found, default=MEMORY_PER_JOB)


def _cgroups(controller: str) -> Iterator[Path]:
    """Yield the directories that limit this process: its cgroup and those above it, in either version's layout."""
    for line in _lines(Path(SELF_CGROUP)):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers or controller in controllers.split(","):
            root = Path(CGROUP) / (controller if controllers else "")
            inner = root / path.lstrip("/")
            yield from (parent for parent in (inner, *inner.parents) if parent.is_relative_to(root))
    yield from (Path(CGROUP), Path(CGROUP) / controller)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
