"""The host's times: every call has a row, and the file has the keys of a measurement."""

from __future__ import annotations

import json

import pytest
import torch

from cake_kda_jit import make_plan
from cake_kda_jit.bench import host, host_peers, host_timing
from cake_kda_jit.bench.host_graphs import GraphedLayer
from cake_kda_jit.errors import UnsupportedProblemError
from cake_kda_jit.layers import KimiDeltaAttention


@pytest.mark.parametrize("options", [[], ["--forward-only"]])
def test_rows_and_file(tmp_path, options):
    path = tmp_path / "host.json"
    sizes = ["--device", "cpu", "--tokens", "3", "--heads", "1", "--hidden", "8", "--runs", "2", "--burst", "2"]
    assert host.main([*sizes, *options, "--json", str(path)]) == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["schema"] == 1 and report["what"] == host.WHAT
    arms = [row["arm"] for row in report["rows"]]
    assert ("the layer, backward" in arms) == (not options) and "plan.update" in arms
    assert "the layer, outside of functional.linear" in arms
    assert ("the layer, backward, inside its nodes" in arms) == (not options)
    assert all(row["ms"]["runs"] == 2 and 0 < row["ms"]["min"] <= row["ms"]["median"] for row in report["rows"])


def test_the_compiled_layer_is_a_row_where_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda layer, *, fullgraph: layer)
    sizes = ["--device", "cpu", "--tokens", "3", "--heads", "1", "--hidden", "8", "--runs", "1", "--burst", "1"]
    for options, rows in ([], 0), (["--compile"], 2):
        assert host.main([*sizes, *options]) == 0
        assert capsys.readouterr().out.count("the layer, compiled") == rows


def test_shares_of_a_call(monkeypatch):
    """A clock that goes on by itself: by 1 inside the function and by 10 outside."""
    now = [0.0]
    monkeypatch.setattr(host_timing.time, "perf_counter", lambda: now[0])

    class Owner:
        @staticmethod
        def inner(seconds: float) -> str:
            now[0] += seconds
            return "found"

    def call(_: object) -> None:
        now[0] += 10
        assert Owner.inner(seconds=1) == "found"

    with host_timing.Inside(Owner, "inner") as inside:
        times = host_timing.timed(call, torch.device("cpu"), 3, 2, share=lambda span: span - inside.take())
    assert times.median == times.max == 10e3
    with pytest.raises(TypeError), host_timing.Inside(Owner, "inner") as inside:
        Owner.inner()
    call(None)
    assert inside.seconds == 0


def test_nodes_of_autograd_are_timed_and_left_as_they_were():
    before, linear = torch.autograd.function.BackwardCFunction.apply, torch.nn.functional.linear
    layer = KimiDeltaAttention(8, 1, 64)
    call = host_timing.Differentiated(lambda: layer(torch.randn(1, 3, 8)), list(layer.parameters()))
    shares = host_timing.measure_shares(call, torch.device("cpu"), 2, 2, with_backward=True)
    whole = host_timing.time_backward(call, torch.device("cpu"), 2)
    assert list(shares) == [host_timing.OUTSIDE, host_timing.NODES] and 0 < shares[host_timing.NODES].min < whole.max
    assert torch.autograd.function.BackwardCFunction.apply is before and torch.nn.functional.linear is linear


def test_a_peer_that_cannot_run_is_refused():
    plan = make_plan(torch.tensor([0, 3]), num_heads=1, head_dim=64, device="cpu")
    with pytest.raises(UnsupportedProblemError, match="x is on cpu"):
        host_peers.measure_fla(plan, torch.zeros(1, 3, 8), 1, 1, "a case")
    with pytest.raises(SystemExit):
        host.main(["--device", "cpu", "--tokens", "3", "--heads", "1", "--hidden", "8", "--peers", "cudnn"])


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
