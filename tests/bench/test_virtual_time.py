"""The time of virtual ranks together, on a pack scaled to a few hundred tokens."""

from __future__ import annotations

import json

from cake_kda_jit.bench import virtual_time
from cake_kda_jit.bench.cp_cases import LAYOUTS


def test_every_layout_stands_beside_one_device(capsys, tmp_path):
    path = tmp_path / "rows.json"
    small = ["--device", "cpu", "--head-dim", "64", "--heads", "1", "--tokens", "150", "--ranks", "2", "--runs", "1"]
    assert virtual_time.main([*small, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    for what in ("forward", "forward + backward"):
        own = [row for row in rows if row["case"] == f"Q1, CP 2, {what}"]
        assert [row["arm"] for row in own] == [virtual_time.ONE_DEVICE, *LAYOUTS]
        assert all(row["ms"]["median"] > 0 for row in own)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| Q1, CP 2, ")]
    assert len(lines) == len(rows) and all(line.endswith(" | 1.000 |") for line in lines if "one device" in line)
