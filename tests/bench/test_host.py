"""The host's times: every call has a row, and the file has the keys of a measurement."""

from __future__ import annotations

import json

import pytest
import torch

from cake_kda_jit import make_plan
from cake_kda_jit.bench import host
from cake_kda_jit.bench.host_graphs import GraphedLayer
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
    assert all(row["ms"]["runs"] == 2 and 0 < row["ms"]["min"] <= row["ms"]["median"] for row in report["rows"])


def test_the_compiled_layer_is_a_row_where_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda layer, *, fullgraph: layer)
    sizes = ["--device", "cpu", "--tokens", "3", "--heads", "1", "--hidden", "8", "--runs", "1", "--burst", "1"]
    for options, rows in ([], 0), (["--compile"], 2):
        assert host.main([*sizes, *options]) == 0
        assert capsys.readouterr().out.count("the layer, compiled") == rows


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
