"""The host's times: every call has a row, and the file has the keys of a measurement."""

from __future__ import annotations

import json

import pytest

from cake_kda_jit.bench import host


@pytest.mark.parametrize("options", [[], ["--forward-only"]])
def test_rows_and_file(tmp_path, options):
    path = tmp_path / "host.json"
    sizes = ["--device", "cpu", "--tokens", "3", "--heads", "1", "--hidden", "8", "--runs", "2", "--burst", "2"]
    assert host.main([*sizes, *options, "--json", str(path)]) == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["schema"] == 1 and report["what"] == host.WHAT
    arms = [row["arm"] for row in report["rows"]]
    assert ("the layer, backward" in arms) == (not options) and "plan.update" in arms
    assert all(row["ms"]["runs"] == 2 and 0 < row["ms"]["min"] <= row["ms"]["median"] for row in report["rows"])
