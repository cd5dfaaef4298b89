"""How many compilations may run at a time: cores, memory and the container's limits decide."""

from __future__ import annotations

import os
from pathlib import Path

from .. import config

MEMORY_PER_JOB = 2 << 30
"""Bytes that one compilation may need: nvcc's peak on the largest program, rounded up."""

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def num_jobs(argument: int | None = None) -> int:
    """Return the argument, ``CAKE_KDA_JIT_JOBS``, ``MAX_JOBS``, or what cores and memory allow; at least 1."""
    asked = argument or config.read("JOBS") or config.read("MAX_JOBS")
    if asked:
        return asked
    return max(1, min(len(os.sched_getaffinity(0)), available_memory() // MEMORY_PER_JOB))


def available_memory(meminfo: str = "/proc/meminfo", limits: tuple[str, ...] = _CGROUP_LIMITS) -> int:
    """Return the bytes of memory that this process may still use, by the machine and by its cgroup."""
    found = [int(line.split()[1]) << 10 for line in _lines(meminfo) if line.startswith("MemAvailable:")]
    found += [int(line) for path in limits for line in _lines(path)[:1] if line.isdigit()]
    return min(found, default=MEMORY_PER_JOB)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
