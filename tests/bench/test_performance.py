"""docs/performance.md and the README's table are what the files of docs/measurements say."""

from __future__ import annotations

import json
import re

import pytest

from cake_kda_jit.bench import performance
from cake_kda_jit.bench.performance_kinds import KINDS
from cake_kda_jit.errors import ConfigError
from cake_kda_jit.paths import data_dir

CP_ROW = {"pack": "Q1", "tokens": 1000, "documents": 4, "heads": 2, "cp": 4, "layout": "zigzag", "boundary": "B1",
          "session": 1, "rank_ms": [2.0, 1.0, 1.0, 1.0], "exchange_ms": 0.1, "alone_ms": None,
          "ahead": 1.0}  # fmt: skip


def report(what="forward", device="NVIDIA H200", script="cake_kda_jit.bench forward", **row):
    machine = {"device": device, "driver": "1.2", "cuda": "13.0", "torch": "2.11"}
    times = {"median": 2.0, "min": 1.0, "max": 2.5, "runs": 4}
    given = {"case": "T 1000, H 2, 1 document", "arm": "cake_kda_jit", "engine": "smxx/chunk_scan", "ms": times}
    rows = [{**given, "bytes": 4 * 10**9, "error": 1e-3, **row}]
    return {"schema": 1, "what": what, "script": script, "commit": "unknown", "date": "2026-01-02",
            "machine": machine, "rows": rows}  # fmt: skip


def test_the_page_and_the_readme_are_current():
    root = data_dir()
    stale = [str(path.relative_to(root)) for path in performance.outdated(root)]
    assert not stale, f"run `python -m cake_kda_jit bench performance --write` for {stale}"


@pytest.mark.parametrize(
    "script, ours, others",
    [
        ("forward", "cake_kda_jit", {"fla": (0.1, 1 / 3), "cudnn fused": (0.5, 0.95), "cudnn prepared": (0.9, 1.5)}),
        ("backward", "saved", {"fla": (0.1, 1 / 3), "cudnn prepared": (0.4, 0.7)}),
    ],
)
def test_the_readme_compares_as_the_files_do(script, ours, others):
    """Less than a third of FLA's time; beside cuDNN 0.5 to 0.95 forward, 1.4 all prepared, and a step 0.4 to 0.7."""
    path = data_dir() / "docs" / "measurements" / f"{script}_h200.json"
    rows = [row for row in json.loads(path.read_text())["rows"] if row["case"].endswith("strong gates")]
    median = {(row["case"], row["arm"]): row["ms"]["median"] for row in rows}
    for theirs, (least, most) in others.items():
        times = {case: time for (case, arm), time in median.items() if arm.split(" (")[0] == theirs}
        assert times
        for case, time in times.items():
            assert least <= median[case, ours] / time <= most, (case, theirs)


def test_a_row_states_its_number_spread_runs_and_origin():
    text = performance.page({"forward_h200.json": report()})
    assert (
        "| T 1000, H 2, 1 document | cake_kda_jit | 2.00 | 150% | 4 | 1000.00 | 1.00 | 1.0e-03 | smxx/chunk_scan |"
        in text
    )
    origin = "NVIDIA H200, driver 1.2, cuda 13.0, torch 2.11; 2026-01-02; commit not recorded;"
    assert f"{origin}\n[forward_h200.json](measurements/forward_h200.json)." in text


def test_what_a_file_notes_stands_below_its_origin():
    text = performance.page({"forward_h200.json": {**report(), "notes": "Of an earlier kernel."}})
    assert "(measurements/forward_h200.json).\n\nOf an earlier kernel.\n\n| case |" in text


def test_files_that_measured_the_same_are_told_apart_by_their_devices():
    text = performance.page({"host_cpu.json": report("host", "a processor"), "host_h200.json": report("host", "H200")})
    assert re.findall("^### (.*)$", text, re.MULTILINE) == ["host, a processor", "host, H200"]


def test_the_readme_takes_the_newest_file_and_says_its_date():
    row = {"records": 8, "jobs": 0, "load": 4.2, "case": "training step, x", "arm": "cached"}
    old = report("first call", script="cake_kda_jit.bench first_call", **row)
    new = {**old, "date": "2026-01-03", "machine": {**old["machine"], "device": "a processor", "driver": "none"}}
    table = performance.readme_table({"first_call_h200.json": old, "first_call_cpu.json": new})
    [line] = table.splitlines()[2:]
    assert line.startswith("| first training step of a process, kernels in the cache | 2.00 ms | 150% | ")
    assert line.endswith(" | a processor, beside a load of 4 per core | 2026-01-03 |")


@pytest.mark.parametrize("script", ["forward", "backward"])
def test_a_recorded_row_has_its_ratio_and_no_spread_nor_error(script):
    text = report(script=f"cake_kda_jit.bench {script}")
    recorded = {"arm": "fla (recorded)", "ms": {"median": 5.0, "min": None, "max": None, "runs": 10}}
    text["rows"].append({**text["rows"][0], **recorded, "bytes": None, "error": None})
    [line] = (line for line in performance.page({"a.json": text}).splitlines() if "fla (recorded)" in line)
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[3:8] == ["5.00", "-", "10", "2500.00", "2.50"] and cells[8:].count("-") == {"forward": 1}.get(
        script, 2
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_shows_its_rows(kind):
    extra = {"walk": {"case": "64 segments, 2 heads, memory", "floor": 1.0}, "conv": {"arm": "copy"},
             "gated_norm": {"arm": "copy"}, "first_call": {"records": 8, "jobs": 2, "load": 0.5},
             "cp": CP_ROW}.get(kind, {})  # fmt: skip
    text = performance.page({"a.json": report(script=f"cake_kda_jit.bench.{kind}", **extra)})
    assert f"## {KINDS[kind].title}\n" in text and "[a.json](measurements/a.json)" in text
    head, rule, row = [line for line in text.splitlines() if line.startswith("|")]
    assert head.count("|") == rule.count("|") == row.count("|")


def test_a_measurement_that_nobody_described_is_shown_all_the_same():
    text = performance.page({"new_h200.json": report(script="cake_kda_jit.bench new")})
    assert "## new\n" in text and "| 2.00 | 150% | 4 | smxx/chunk_scan |" in text


def test_the_shorter_name_is_current_and_errors_are_no_times():
    errors = report("errors")
    del errors["rows"][0]["ms"]
    files = {"walk_h200.json": report(), "walk_h200_old.json": report(), "walk_cpu.json": report(device="x"),
             "errors.json": errors}  # fmt: skip
    assert performance.current_and_earlier(files) == (
        ["walk_cpu.json", "walk_h200.json"],
        ["errors.json", "walk_h200_old.json"],
    )


def test_what_is_no_measurement_is_refused(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"schema": 2}), encoding="utf-8")
    with pytest.raises(ConfigError, match="no measurement of schema 1"):
        performance.read_reports(tmp_path)


def test_every_number_of_the_readme_is_on_the_page_or_in_a_file():
    reports = performance.read_reports(data_dir() / "docs" / "measurements")
    medians = [row["ms"]["median"] for one in reports.values() for row in one["rows"] if "ms" in row]
    for line in performance.readme_table(reports).splitlines()[2:]:
        value, unit = re.search(r"\| ([\d.]+) (s|ms|us) \|", line).groups()
        ms = float(value) * {"s": 1e3, "ms": 1.0, "us": 1e-3}[unit]
        assert any(abs(ms - median) < 0.01 * median for median in medians), line


def test_a_readme_without_marks_is_refused():
    with pytest.raises(ConfigError, match="no place for the table"):
        performance.with_table("# title\n", "| a |\n")
