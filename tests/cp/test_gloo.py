"""Real processes over gloo: 2, 4 and 8 of them, each number started once for all checks of ``worlds``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .worlds import CHECKS

ROOT = Path(__file__).resolve().parents[2]
STARTED_TOGETHER = ((2, 4), (8,))
"""Eight processes have two processors to themselves, or they would be late by their own crowd."""
SIZES = tuple(size for sizes in STARTED_TOGETHER for size in sizes)


@pytest.fixture(scope="module")
def worlds():
    """The results of all checks by the number of processes."""
    results = {}
    for sizes in STARTED_TOGETHER:
        started = {size: start_world(size) for size in sizes}
        for size, process in started.items():
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            results[size] = json.loads(out)
    return results


def start_world(size: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.cp.worlds", str(size)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_over_gloo(worlds, check, size):
    failed = worlds[size][check]
    assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())
