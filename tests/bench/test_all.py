"""`bench all` knows every measurement, and its smoke form runs on a machine without a GPU."""

from __future__ import annotations

import json

import pytest

from cake_kda_jit.bench import all as bench_all
from cake_kda_jit.bench.command import MEASUREMENTS

UNTIMED = {"all", "determinism", "pairs", "performance", "precision", "training", "virtual_ranks"}
UNTIMED |= {"exchanges", "halos", "walk_precision"}
"""What is no table of times, or is made of other files."""


def test_every_measurement_of_time_is_in_it():
    timed = {one.name for one in bench_all.MEASUREMENTS}
    assert timed == MEASUREMENTS.keys() - UNTIMED, "give it a row in bench/all.py, or name it in UNTIMED here"


def test_smoke_numbers_do_not_replace_measurements(capsys):
    with pytest.raises(SystemExit):
        bench_all.main(["--smoke"])
    assert "--smoke needs --out" in capsys.readouterr().err


def test_one_that_breaks_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    def broken(argv):
        raise RuntimeError("no such clock")

    monkeypatch.setattr("cake_kda_jit.bench.host.main", broken)
    arguments = ["--device", "cpu", "--smoke", "--out", str(tmp_path), "--only", "host", "timing"]
    assert bench_all.main(arguments) == 1
    assert "RuntimeError: no such clock" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["cpu_timing.json"]


def test_the_smoke_form_writes_a_file_each(tmp_path, capsys):
    assert bench_all.main(["--device", "cpu", "--smoke", "--out", str(tmp_path), "--only", "timing", "host", "cp"]) == 0
    files = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.iterdir()}
    assert set(files) == {"cpu_timing.json", "host_cpu.json", "cp_cpu.json"}
    for report in files.values():
        assert report["schema"] == 1 and report["rows"]
    assert capsys.readouterr().out.count("| written |") == 3
