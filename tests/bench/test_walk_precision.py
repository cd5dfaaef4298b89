"""The walk's error table: the design's figures within a factor of 2, and errors that do not grow with the count."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

from cake_kda_jit import transfer_walk
from cake_kda_jit.bench import walk_precision
from cake_kda_jit.bench.walk_precision import CASES, make_summaries, make_walk, walk_errors
from cake_kda_jit.catalog import registry
from cake_kda_jit.programs.transfer_walk import FORMS

# After 64 near-identity segments, as docs/numerics.md states them for truncating accumulation.
DESIGNED = {
    "bf16x3_hw64": 3.1e-7,
    "bf16x3": 3.1e-7,
    "tf32_hilo": 8e-7,
    "tf32_hilo_three_mma": 8e-7,
    "tf32_hilo_plain_tf32": 3e-4,
}
# For summaries that forget, whatever the number of segments.
BOUNDS = {
    "bf16x3_hw64": 5e-7,
    "bf16x3": 5e-7,
    "tf32_hilo": 1e-6,
    "tf32_hilo_three_mma": 1e-6,
    "tf32_hilo_plain_tf32": 5e-4,
}


def errors_of(form: str, M: torch.Tensor, B: torch.Tensor, transpose: bool) -> dict[int, float]:
    return walk_errors(registry().get("transfer_walk", form, "cpu"), make_walk(M, B, transpose))


@cache
def summaries_of(case: str, head_dim: int = 64):
    return make_summaries(CASES[case], 256, heads=1, head_dim=head_dim)


def test_the_forms_are_those_of_the_program():
    assert set(FORMS) == set(DESIGNED) == set(BOUNDS)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_near_identity_segments_reproduce_the_table(form, transpose, head_dim):
    """Within a factor of 2, as the summaries are others: what truncation loses in a direction depends on its states."""
    errors = errors_of(form, *summaries_of("near identity", head_dim), transpose)
    assert DESIGNED[form] / 2 < errors[64] < 2 * DESIGNED[form]
    assert max(errors.values()) < 2 * DESIGNED[form]
    assert errors[256] < 1.2 * errors[16], "the error grows with the number of segments"


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("case", [case for case in CASES if case != "near identity"])
@pytest.mark.parametrize("form", FORMS)
def test_other_summaries_stay_within_the_bounds(form, case, transpose):
    segments = 256 if form == "bf16x3_hw64" else 64
    M, B = (tensor[:segments] for tensor in summaries_of(case))
    errors = errors_of(form, M, B, transpose)
    assert max(errors.values()) <= BOUNDS[form]
    assert errors[segments] < 1.2 * max(errors[1], errors[4]), "the error grows with the number of segments"


def test_the_summaries_are_what_their_names_say():
    norms = {case: torch.linalg.matrix_norm(summaries_of(case)[0][:4].double(), ord=2).max().item() for case in CASES}
    assert 0.95 < norms["near identity"] < 1.0
    assert 0.1 < norms["weak gates"] < 0.9 and 0.1 < norms["correlated keys"] < 0.9
    assert 1e-4 < norms["strong gates"] < 0.1


def test_half_width_has_the_bits_of_full_width():
    M, B = make_summaries(CASES["near identity"], 16, heads=2, head_dim=128)
    initial = torch.randn(2, 2, 128, 128, generator=torch.Generator().manual_seed(3))
    offsets = torch.tensor([0, 5, 16])
    results = [transfer_walk(M, B, initial, offsets, variant=name) for name in ("bf16x3_hw64", "bf16x3")]
    for narrow, full in zip(*results):
        assert torch.equal(narrow, full)


def test_the_script_prints_a_table_and_prints_it_again(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(walk_precision, "COUNTS", (1, 4))
    path = tmp_path / "rows.json"
    assert walk_precision.main(["--head-dim", "64", "--json", str(path)]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith("K = V = 64, segments of 32 tokens, heads: 1; ")
    rows = [line for line in lines if line.startswith("| ") and "`cpu " in line]
    assert len(rows) == len(CASES) * len(FORMS) and all(row.count("|") == 5 for row in rows)
    assert len(json.loads(path.read_text())["rows"]) == len(rows)
    assert walk_precision.main(["--table", str(path)]) == 0
    assert capsys.readouterr().out == text
