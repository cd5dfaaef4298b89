"""`bench cp`: its cases are the published ones, it times what ranks do, and a table that was cut short goes on."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cake_kda_jit import KcpContext, Partition, VirtualGroup, run_virtual
from cake_kda_jit.bench import cp, cp_timing, performance, performance_cp
from cake_kda_jit.bench.cp_cases import (
    ARMS,
    BOUNDARIES,
    HEAD_DIM,
    HEADS,
    LAYOUTS,
    PACKS,
    RANKS,
    SESSIONS,
    Estimate,
    Sizes,
    Unit,
    units_in_order,
)
from cake_kda_jit.bench.cp_tables import PUBLISHED, SCRIPT, Table, lines_of, read_published, read_rows
from cake_kda_jit.bench.cp_timing import CYCLES_PER_SECOND, EXCHANGE, HostClock, PacedClock, measure_alone
from cake_kda_jit.bench.cp_work import LoopbackGroup, Message, RankWork, make_inputs, take_arm
from cake_kda_jit.errors import ConfigError
from cake_kda_jit.paths import data_dir
from cake_kda_jit.runtime import prepared

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SIZES = Sizes(heads=2, head_dim=64, tokens=700)
SMALL = ["--device", "cpu", "--heads", "2", "--head-dim", "64", "--tokens", "700", "--runs", "1", "--packs", "Q1"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A table of one pack on 2 and 4 ranks, two sessions: 12 of 144 rows."""
    path = tmp_path_factory.mktemp("cp") / "cp.json"
    assert cp.main([*SMALL, "--cp", "2", "4", "--json", str(path)]) == 0
    return path


def test_the_packs_are_those_that_the_tests_have():
    given = json.loads((ROOT / "tests" / "data" / "packs.json").read_text(encoding="utf-8"))
    assert {name: list(lengths) for name, lengths in PACKS.items()} == given["packs"]
    assert (given["heads"], given["head_dim"]) == (HEADS, HEAD_DIM)


def test_the_table_has_the_published_rows():
    published = read_published(data_dir() / "docs" / "measurements" / PUBLISHED)
    units = units_in_order(list(PACKS), RANKS, LAYOUTS, SESSIONS)
    ours = {(unit.pack, unit.ranks, unit.layout, boundary) for unit in units for boundary in BOUNDARIES}
    assert len(published) == 144 and len(units) == 144  # two boundaries a unit, two sessions a row
    assert {(line.pack, line.cp, line.layout, line.boundary) for line in published} == ours
    for line in published:
        assert (line.tokens, line.documents) == (sum(PACKS[line.pack]), len(PACKS[line.pack]))


def test_a_table_that_is_cut_short_has_one_pack_whole_and_then_both_ends():
    units = units_in_order(list(PACKS), RANKS, LAYOUTS, SESSIONS)
    first = len(RANKS) * len(LAYOUTS)
    assert {unit.pack for unit in units[:first]} == {"Q1"}
    assert [unit.ranks for unit in units[first : first + 30]] == [2] * 15 + [16] * 15
    assert [unit.session for unit in units] == [1] * 72 + [2] * 72


def test_one_rank_has_one_layout():
    assert [unit.layout for unit in units_in_order(["Q1"], [1], LAYOUTS, [1])] == ["contiguous"]


@pytest.mark.parametrize("pack", PACKS)
def test_short_packs_keep_their_documents(pack):
    lengths = SIZES.lengths(pack)
    assert sum(lengths) == 700 and len(lengths) == len(PACKS[pack]) and min(lengths) > 0


def test_the_time_left_follows_what_units_took():
    estimate = Estimate([1.0, 1.0, 2.0])
    assert (estimate.following, estimate.left) == (1.0, 4.0)
    estimate.finished(3.0)
    assert (estimate.following, estimate.left) == (3.0, 9.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_alone_exchanges_what_ranks_exchange(layout):
    """Each rank of a LoopbackGroup asks for the messages of the same sizes, as often, as among all ranks."""
    unit = Unit("Q1", 4, layout, 1)
    partition, inputs = SIZES.partition(unit), make_inputs(400, 2, 64, CPU)

    def received(rank: int, ctx: KcpContext) -> tuple[int, int]:
        RankWork(inputs, ctx.num_local_tokens, cp_context=ctx).step()
        return ctx.channel.received_bytes, ctx.channel.num_exchanges

    together = run_virtual(KcpContext(partition, VirtualGroup(4), options=SIZES.options), received).results
    loopback = KcpContext(partition, LoopbackGroup(4), options=SIZES.options)
    assert [received(rank, loopback.of_rank(rank)) for rank in range(4)] == together
    for rank in range(4):
        times = measure_alone(loopback.of_rank(rank), inputs, ARMS, 1, HostClock())
        assert (times.received_bytes("B3"), len(times.messages["B3"])) == together[rank]
        assert times.messages["B1"] == times.messages["B3"][: len(times.messages["B1"])]
        assert times.ms.keys() == {(boundary, arm) for boundary in BOUNDARIES for arm in (*ARMS, EXCHANGE)}


def test_both_boundaries_have_the_modules_values():
    """One rank alone holds all: B1 and B3 run the same forward, and B3 gives a gradient for each tensor."""
    inputs = make_inputs(200, 2, 64, CPU)
    ctx = KcpContext(Partition.contiguous([0, 90, 200], 1), LoopbackGroup(1), options=SIZES.options).of_rank(0)
    work = RankWork(inputs, 200, cp_context=ctx)
    o, gradients = work.forward(), work.step()
    assert o.shape == inputs.do.shape and not o.requires_grad and o.isfinite().all()
    leaves = [*inputs.projected, inputs.g, inputs.beta, *inputs.weights, inputs.A_log, inputs.dt_bias]
    assert [one.shape for one in gradients] == [leaf.shape for leaf in leaves]
    assert all(one.isfinite().all() and one.any() for one in gradients)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_an_arm_is_the_walk_that_runs(monkeypatch, arm, boundary):
    """On the second of four ranks, which has inner spans: the exchange's walk is the arm's, whichever came before."""
    unit, inputs = Unit("Q2", 4, "per_document_zigzag", 1), make_inputs(400, 2, 64, CPU)
    ctx = KcpContext(SIZES.partition(unit), LoopbackGroup(4), options=SIZES.options).of_rank(1)
    work, walks = RankWork(inputs, ctx.num_local_tokens, cp_context=ctx), []

    def account(launches):
        walks.extend(one.kernel.record.variant for one in launches if one.kernel.record.program == "transfer_walk")

    monkeypatch.setattr(prepared, "account", account)
    for one in (*ARMS, arm):
        walks.clear()
        take_arm(ctx, one)
        work.of(boundary)()
    assert set(walks) == {arm}


def test_a_loopback_fills_what_is_received_with_small_numbers():
    channel = LoopbackGroup(2).channel(0)
    received = torch.full((3, 8, 8), float("nan"))
    Message({1: 64}, {1: received.nbytes}).start(channel, "sizes", CPU).wait()
    channel.start({}, {1: received}, "values").wait()
    assert received.abs().max() < 0.2 and received.std() > 0.01  # noise of standard deviation 0.02
    assert channel.log == [Message({1: 64}, {1: received.nbytes}), Message({}, {1: received.nbytes})]


class Machine:
    """A host and a device, each with its own time in seconds; the device does what it is handed, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.free_at = 0.0
        monkeypatch.setattr(cp_timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.hand_over(cycles / CYCLES_PER_SECOND))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))

    def hand_over(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.now) + seconds

    def run(self, host: float, device: float) -> None:
        """Ten kernels, each handed over in a tenth of the host's time."""
        for _ in range(10):
            self.now += host / 10
            self.hand_over(device / 10)


class Event:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def record(self) -> None:
        self.at = max(self.machine.free_at, self.machine.now)

    def query(self) -> bool:
        return self.at <= self.machine.now

    def synchronize(self) -> None:
        self.machine.now = max(self.machine.now, self.at)

    def elapsed_time(self, last: Event) -> float:
        return 1e3 * (last.at - self.at)


@pytest.mark.parametrize("host", [1e-4, 2e-3, 5e-2])
@pytest.mark.parametrize("guess", [1e-5, 1e-2])
def test_the_hosts_time_is_not_in_a_devices_time(monkeypatch, host, guess):
    """Whatever the host takes and is guessed to take: every run is handed over before the device begins with it."""
    machine, clock, key = Machine(monkeypatch), PacedClock(), ("B1", ARMS[0])
    clock.begin(Unit("Q1", 16, "zigzag", 1))
    for _ in range(3):
        spans = [clock.start(key, lambda: machine.run(host, 1e-3), guess) for _ in range(4)]
        assert clock.milliseconds(key, spans) == pytest.approx([1.0] * 4)
    assert clock.ahead == 1.0


def test_rows_say_what_they_are_of(measured):
    report, rows = read_rows(measured)
    assert report["script"] == SCRIPT and len(rows) == 2 * 3 * 2 * 2 * 2  # ranks, layouts, boundaries, arms, sessions
    for row in rows:
        assert (row.pack, row.tokens, row.documents, row.heads) == ("Q1", 700, 4, 2)
        assert len(row.rank_ms) == row.cp and row.ms.median == pytest.approx(max(row.rank_ms), abs=1e-4)
        assert row.bytes > 0 and row.exchange_ms > 0 and row.ahead == 1.0 and row.alone_ms is None
    assert {(row.arm, row.session) for row in rows} == {(arm, session) for arm in ARMS for session in SESSIONS}


def test_a_table_goes_on_where_it_was_cut(tmp_path, capsys):
    path = tmp_path / "cp.json"
    first = [*SMALL, "--cp", "2", "--sessions", "1", "--layouts", "zigzag", "--json", str(path)]
    assert cp.main(first) == 0
    before = read_rows(path)[1]
    assert cp.main([*SMALL, "--cp", "2", "--sessions", "1", "--seconds", "0", "--resume", str(path)]) == 0
    assert "2 units are left" in capsys.readouterr().out and read_rows(path)[1] == before
    assert cp.main([*SMALL, "--cp", "2", "--sessions", "1", "--resume", str(path)]) == 0
    after = read_rows(path)[1]
    assert after[: len(before)] == before  # not measured again
    assert sorted({row.layout for row in after}) == sorted(LAYOUTS) and len(after) == 3 * len(before)


def test_a_first_step_does_not_stand_for_its_unit(measured):
    _, (row, *_) = read_rows(measured)
    table = Table(None, torch.device("cpu"), "")
    table.add([replace(row, boundary="first step")])
    assert not table.done
    table.add([row])
    assert table.done == {(row.pack, row.cp, row.layout, row.session)}


def test_a_table_of_other_heads_is_refused(measured):
    with pytest.raises(
        ConfigError, match="its what is 'Virtual ranks, H = HV = 2, .*, this run's 'Virtual ranks, H = HV = 4, "
    ):
        cp.main([*SMALL, "--heads", "4", "--resume", str(measured)])


def test_csv_markdown_and_picture(measured, tmp_path):
    path = tmp_path / "cp_x.json"
    path.write_bytes(measured.read_bytes())
    published = data_dir() / "docs" / "measurements" / PUBLISHED
    (tmp_path / PUBLISHED).write_bytes(published.read_bytes())
    assert cp.main(["--tables", str(path)]) == 0
    with path.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        ours = list(csv.DictReader(file))
    theirs = next(line for line in published.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    assert list(ours[0])[: theirs.count(",") + 1] == theirs.split(",")
    assert [(row["cp"], row["layout"], row["boundary"]) for row in ours[:3]] == [
        ("2", "contiguous", "B1"), ("2", "contiguous", "B3"), ("2", "zigzag", "B1"),
    ]  # fmt: skip
    for row in ours:
        ratio = float(row["tf32_hilo_ms_s2"]) / float(row["bf16x3_hw64_ms_s2"])
        assert float(row["speedup_s2"]) == pytest.approx(
            ratio, rel=2e-2
        )  # of times with three decimals, 0.1 ms or more
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert "12 of 144 rows" in text and text.count("| Q1 |") == 12
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert sorted(one.suffix for one in tmp_path.iterdir()) == [".csv", ".csv", ".json", ".md", ".png"]


def test_tables_and_pictures_of_a_table_that_was_cut(measured, tmp_path):
    """One session, one layout, one arm, and nothing published beside."""
    report, rows = read_rows(measured)
    kept = [row for row in report["rows"] if (row["session"], row["layout"], row["arm"]) == (1, "zigzag", ARMS[0])]
    path = tmp_path / "cut.json"
    path.write_text(json.dumps({**report, "rows": kept}), encoding="utf-8")
    assert cp.main(["--tables", str(path)]) == 0
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert ",-," not in path.with_suffix(".csv").read_text(encoding="utf-8")


def test_the_page_shows_medians_beside_the_published_ones(measured):
    report = json.loads(measured.read_text(encoding="utf-8"))
    text = performance.page({"cp_h200.json": report})
    told = "12 of 144 rows, of Q1 alone; Q2, Q3, Q4, Q5, Q6 are not measured yet. Sessions: 2, runs of each arm"
    assert "## Context parallel\n" in text and told in " ".join(text.split())
    assert "![" in text and "](measurements/cp_h200.png)" in text and "(measurements/cp_h200.csv)" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| 2 |", "| 4 |"))]
    assert len(rows) == 12
    published = [one for one in read_published(data_dir() / "docs" / "measurements" / PUBLISHED) if one.pack == "Q1"]
    [line] = [one for one in published if (one.cp, one.layout, one.boundary) == (4, "zigzag", "B3")]
    [row] = [row for row in rows if row[:3] == ["| 4", "B3", "zigzag"]]
    assert row[4].endswith(f"({(line.speedup(1) + line.speedup(2)) / 2:.2f})")


def test_real_ranks_stand_beside_one_device_and_what_was_recorded(measured):
    _, rows = read_rows(measured)
    [row] = [one for one in rows if (one.cp, one.layout, one.boundary, one.arm, one.session)
             == (2, "zigzag", "B3", ARMS[0], 1)]  # fmt: skip
    timed = replace(row.ms, median=20.0)
    together = replace(row, ms=timed, exchange_ms=4.0, alone_ms=17.0, heads=32)
    alone = replace(row, cp=1, layout="contiguous", arm="whole", ms=replace(timed, median=38.0), heads=32)
    first = replace(row, boundary="first step", ms=replace(timed, median=5000.0))
    reports = performance.read_reports(data_dir() / "docs" / "measurements")
    text = performance_cp.real_body([alone, together], [first], reports)
    # 3 ms more than alone; FLA's figure is that of its file.
    assert "| Q1 | 2 | zigzag | B3 | 20.00 | - | 1.90 | 4.00 | 3.00 | 107.2 |" in text
    assert "The first step of Q1 had ended after 5.0 s" in text


def test_two_processes_over_gloo(tmp_path):
    """The form of several devices, on the CPU: torchrun, every layout, one device beside, and a first step."""
    path = tmp_path / "real.json"
    options = [*SMALL, "--real", "--sessions", "1", "--layouts", "per_document_zigzag", "--json", str(path)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, "-m", "cake_kda_jit.bench", "cp", *options], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "first step after" in done.stdout
    rows = read_rows(path)[1]
    first, others = rows[0], rows[1:]
    assert first.boundary == "first step" and len(first.rank_ms) == 2
    assert [(row.cp, row.boundary, row.arm) for row in others] == [
        *((1, boundary, "whole") for boundary in BOUNDARIES),
        *((2, boundary, arm) for boundary in BOUNDARIES for arm in ARMS),
    ]
    for row in others[2:]:
        assert row.engine == "gloo" and row.alone_ms > 0 and row.exchange_ms > 0 and row.ahead is None
    assert len(lines_of(rows)) == 4
