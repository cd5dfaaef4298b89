"""The host's times: every call has a row, and the file has the keys of a measurement."""

from __future__ import annotations

import json
import weakref

import pytest
import torch

from cake_kda_jit import make_plan
from cake_kda_jit.bench import host, host_peers, host_timing, performance
from cake_kda_jit.bench.core import Times, make_report
from cake_kda_jit.bench.host_graphs import GraphedLayer
from cake_kda_jit.bench.host_subjects import CLOCKS, STACKED
from cake_kda_jit.bench.host_timing import CLOCKED, INSIDE, LAUNCHES, PRODUCTS, PYTHON, Subject
from cake_kda_jit.errors import UnsupportedProblemError
from cake_kda_jit.layers import KimiDeltaAttention
from cake_kda_jit.runtime.load import Kernel

SMALL = ["--device", "cpu", "--tokens", "3", "--heads", "1", "--hidden", "8", "--runs", "2", "--burst", "2"]
CPU = torch.device("cpu")


@pytest.mark.parametrize("options", [[], ["--forward-only"]])
def test_rows_and_file(tmp_path, options):
    path = tmp_path / "host.json"
    assert host.main([*SMALL, *options, "--json", str(path)]) == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["schema"] == 1 and report["what"] == host.WHAT
    rows = {row["arm"]: row for row in report["rows"]}
    assert {"1,000 turns of a bare loop", "torch.empty", "plan.update"} <= rows.keys()
    assert any("backward" in name for name in rows) == (not options)
    for layer in "the layer", f"a layer of a stack of {STACKED}":
        forward = {"", CLOCKED, PRODUCTS, LAUNCHES, PYTHON}
        assert {f"{layer}{share}" for share in forward} <= rows.keys()
        assert options or {f"{layer}, backward{share}" for share in {*forward, INSIDE}} <= rows.keys()
    for row in rows.values():
        times = row["ms"]
        assert times["runs"] == 2 and 0 < times["min"] <= times["median"] <= times["max"]
        assert sum(times["runs"] for times in (row["fast"], row["slow"]) if times) in (0, 2)


def test_the_compiled_layer_is_a_row_where_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda layer, *, fullgraph: layer)
    for options, rows in ([], 0), (["--compile"], 2):
        assert host.main([*SMALL, *options]) == 0
        assert capsys.readouterr().out.count("the layer, compiled") == rows


class Clock:
    """Goes on by itself: by a second within ``inner`` and by ten outside; a turn of the bare loop takes ``pace``."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.pace = 0.0, 0.0
        monkeypatch.setattr(host_timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(host_timing, "turns", lambda: self.pace)

    def inner(self, seconds: float) -> str:
        self.now += seconds
        return "found"

    def call(self) -> None:
        self.now += 10
        assert self.inner(seconds=1) == "found"


def test_a_call_is_taken_apart(monkeypatch):
    clock = Clock(monkeypatch)
    subject = Subject("a call", clock.call, count=2, clocks={", inside": ((clock, "inner"),)})
    rows = {row.arm: row.ms for row in host_timing.measure([subject], CPU, 3, 4, "a case")}
    expected = {"a call": 5500, "a call, with clocks": 5500, "a call, inside": 500, "a call, Python time": 5000}
    assert {name: times.median for name, times in rows.items()} == expected
    assert all(times.runs == 3 and times.min == times.max for times in rows.values())
    clock.call()
    assert clock.inner == Clock.inner.__get__(clock), "the clock was taken off"


def test_a_function_that_raises_is_left_as_it_was(monkeypatch):
    clock = Clock(monkeypatch)
    with pytest.raises(TypeError), host_timing.Inside((clock, "inner")):
        clock.inner()
    assert clock.inner == Clock.inner.__get__(clock)


def test_a_clock_that_is_not_met_is_refused(monkeypatch):
    clock = Clock(monkeypatch)
    subject = Subject("a call", lambda: None, clocks={", inside": ((clock, "inner"),)})
    with pytest.raises(UnsupportedProblemError, match="a call was not seen to call inner"):
        host_timing.measure([subject], CPU, 1, 1, "a case")


@pytest.mark.parametrize("slow", [2.0, 1.2])
def test_each_run_has_the_pace_of_the_loop_beside_it(monkeypatch, slow):
    """Eight runs of 1 to 8 seconds: the loop is fast beside those of 2 and 4, and ``slow`` beside all others."""
    clock, spans = Clock(monkeypatch), iter([0] * 2 * host_timing.WARMUP + [s for n in range(1, 9) for s in (0, n)])

    def call() -> None:
        span = next(spans)
        clock.now += span
        clock.pace = 1.0 if span in (2, 4) else slow

    [row] = host_timing.measure([Subject("a call", call)], CPU, 8, 1, "a case")
    assert row.ms == Times(4500, 1000, 8000, 8)
    paces = (Times(3000, 2000, 4000, 2), Times(5500, 1000, 8000, 6)) if slow == 2 else (None, None)
    assert (row.fast, row.slow) == paces
    text = performance.page({"host_cpu.json": make_report(host.WHAT, "cake_kda_jit.bench.host", CPU, [row])})
    cells = "3000000 | 5500000" if slow == 2 else "- | -"
    assert f"| a case | a call | 4500000 | 700% | 8 | {cells} | cake_kda_jit |" in text


def test_few_loops_at_either_end_are_no_pace():
    assert host_timing.between_paces([9.0, *[2.0] * 38, 0.1]) is None
    assert host_timing.between_paces([*[1.0] * 10, *[4.0] * 30]) == 2


@pytest.mark.parametrize("of_backward", [False, True])
def test_what_calls_return_is_freed_behind_the_burst(of_backward):
    """The outputs that live are counted as each call begins."""
    alive, counts = weakref.WeakSet(), []

    def call(_: object = None) -> torch.Tensor:
        counts.append(len(alive))
        output = torch.zeros(1)
        alive.add(output)
        return output

    bursts = host_timing.Bursts(call, 3, prepare=call if of_backward else lambda: None)
    bursts.take(CPU)
    assert counts == list(range(8 if of_backward else 4)) and not alive


def test_nodes_of_autograd_are_timed_and_left_as_they_were():
    before = torch.autograd.function.BackwardCFunction.apply, torch.nn.functional.linear, torch.mm, Kernel.launch_all
    layer = KimiDeltaAttention(8, 1, 64)
    subject = Subject("it", lambda: layer(torch.randn(1, 3, 8)), list(layer.parameters()), clocks=CLOCKS)
    rows = {row.arm: row.ms for row in host_timing.measure([subject], CPU, 2, 2, "a case")}
    whole, inside = (rows[f"it, backward{share}"] for share in (CLOCKED, INSIDE))
    assert 0 < inside.min < whole.max
    parts = sum(rows[f"it, backward{share}"].min for share in (PRODUCTS, LAUNCHES, PYTHON))
    assert parts <= inside.max
    after = torch.autograd.function.BackwardCFunction.apply, torch.nn.functional.linear, torch.mm, Kernel.launch_all
    assert after == before


def test_a_peer_that_cannot_run_is_refused():
    plan = make_plan(torch.tensor([0, 3]), num_heads=1, head_dim=64, device="cpu")
    with pytest.raises(UnsupportedProblemError, match="x is on cpu"):
        host_peers.make_fla(plan, torch.zeros(1, 3, 8))
    with pytest.raises(SystemExit):
        host.main([*SMALL, "--peers", "cudnn"])


def test_what_is_captured_is_the_layer_with_a_plan_of_the_boundaries(monkeypatch):
    """With gradients, pack after pack; what a capture adds to it is tested on a GPU."""
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda run, sample: run)
    torch.manual_seed(0)
    layer, sizes = KimiDeltaAttention(8, 1, 64), {"num_heads": 1, "head_dim": 64, "device": "cpu"}
    plan = make_plan(torch.tensor([0]), **sizes, max_documents=3, max_tokens=70)
    graphed = GraphedLayer(layer, plan, torch.zeros(1, 70, 8), plan.cu_seqlens.clone())
    for boundaries in ([0, 70, 70, 70], [0, 5, 5, 66]):
        x, tokens = torch.randn(1, 70, 8), boundaries[-1]
        found = graphed(x, torch.tensor(boundaries))[:, :tokens]
        expected = layer(x[:, :tokens], plan=make_plan(torch.tensor(boundaries), **sizes))
        # The projections' products may be cut in another way for another number of rows.
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(o.square().sum(), list(layer.parameters())) for o in (found, expected)]
        torch.testing.assert_close(*gradients)
