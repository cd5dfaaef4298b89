"""Real processes over gloo: 2 and 4 of them, each number started once for all checks of ``worlds``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .worlds import CHECKS

ROOT = Path(__file__).resolve().parents[2]
SIZES = (2, 4)


@pytest.fixture(scope="module")
def worlds():
    """The results of all checks by the number of processes; all are started at the first use."""
    command = [sys.executable, "-m", "tests.cp.worlds"]
    started = {
        size: subprocess.Popen(
            [*command, str(size)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for size in SIZES
    }
    results = {}
    for size, process in started.items():
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        results[size] = json.loads(out)
    return results


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_over_gloo(worlds, check, size):
    failed = worlds[size][check]
    assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())
