"""The first call's measurement: what it calls a step's kernels, and that a compiler where none may run is seen."""

from __future__ import annotations

import json

import pytest

from cake_kda_jit.arch import host_arch
from cake_kda_jit.bench import first_call, first_step
from cake_kda_jit.runtime.load import loaded_kernels


@pytest.mark.parametrize("step", first_call.STEP_PROGRAMS)
def test_the_records_are_those_that_a_step_loads(step, monkeypatch):
    monkeypatch.setattr("cake_kda_jit.runtime.load._kernels", {})
    first_step.STEPS[step]("cpu")()
    found = {kernel.record.name for kernel in loaded_kernels()}
    assert {record.name for record in first_call.step_records(step, host_arch().name)} == found


@pytest.fixture
def bench(tmp_path):
    return first_call.Bench(tmp_path, "conv", host_arch(), "cpu", jobs=2)


def test_a_kernel_that_is_compiled_is_not_taken_for_a_prebuilt_one(bench, tmp_path):
    (tmp_path / "step0").mkdir()
    with pytest.raises(first_call.MeasurementFailed, match="ended with 1"):
        first_call.measure_arm(bench, "prebuilt", 0)
    assert "g++" in (tmp_path / "compiler was run").read_text(encoding="utf-8"), "the poisoned compiler was asked"


def test_another_target_is_compiled_only(capsys):
    with pytest.raises(SystemExit):
        first_call.main(["--device", "cpu", "--arch", "sm_90a", "--arms", "cached"])
    assert "sm_90a does not run on this cpu" in capsys.readouterr().err


def test_an_empty_cache_then_a_full_one_then_no_compiler(tmp_path):
    path = tmp_path / "first_call.json"
    options = ["--device", "cpu", "--step", "conv", "--arms", "together", "cached", "prebuilt", "--runs", "1"]
    assert first_call.main([*options, "--jobs", "2", "--json", str(path)]) == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    compiled, cached, prebuilt = report["rows"]
    assert [row["arm"] for row in report["rows"]] == ["together", "cached", "prebuilt"]
    assert (compiled["records"], compiled["jobs"], cached["jobs"], prebuilt["jobs"]) == (2, 2, 0, 0)
    assert "host compiler" in compiled["engine"] and prebuilt["engine"] == "no compiler"
    assert all(row["ms"]["median"] > 0 for row in report["rows"])
