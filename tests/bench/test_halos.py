"""Halos between two processes over gloo, on the CPU: it is about whether the measurement works."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

from cake_kda_jit.bench.halos import AT_ONCE, EACH, ONE, WORKS

ROOT = Path(__file__).resolve().parents[2]


def test_two_processes_over_gloo(tmp_path):
    path = tmp_path / "halos.json"
    sizes = ["--heads", "2", "--head-dim", "64", "--tokens", "300", "--layouts", "zigzag", "--runs", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, "-m", "cake_kda_jit.bench", "halos", *sizes, "--device", "cpu", "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [(row["case"], row["arm"]) for row in rows] == [
        (f"Q1, CP 2, zigzag, {work}", arm) for work, arm in product(WORKS, (EACH, ONE, AT_ONCE))
    ]
    assert all(row["engine"] == "gloo" and row["ms"]["min"] > 0 for row in rows)
