"""The error table of virtual ranks on packs scaled to a few hundred tokens, by the cpu family."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from cake_kda_jit.bench import virtual_ranks
from cake_kda_jit.bench.cp_cases import PACKS, Sizes
from cake_kda_jit.bench.problems import NAMES
from cake_kda_jit.bench.virtual_ranks import STEP_ERRORS, allowed_difference, make_pack, rows_of

from .test_walk_precision import DESIGNED

DATA = Path(__file__).resolve().parents[1] / "data"


def test_the_packs_are_those_that_were_published():
    published = json.loads((DATA / "packs.json").read_text())
    assert {name: list(lengths) for name, lengths in PACKS.items()} == published["packs"]
    assert published["source"].startswith("totals and document counts: FlashInfer pull request 7176")


def test_walks_in_fp32_differ_by_their_errors():
    sizes = Sizes(1, 64, 1500)
    pack = make_pack(sizes.lengths("Q1"), regime="slow", heads=1, head_dim=64, dtype=torch.float32)
    alone, same, other = rows_of(pack, ("slow", "Q1", 4), ["bf16x3_hw64", "bf16x3", "tf32_hilo"])
    assert all(error < 1e-5 for error in alone.errors.values()), "products of 64 decays of 1e-7 each, and their sums"
    assert not any(same.errors.values())
    for name, error in other.errors.items():
        assert 0 < error <= allowed_difference(other.form, other.other, name, is_exact=True), name


def test_the_errors_are_those_of_the_walks_table():
    assert STEP_ERRORS == DESIGNED
    assert set(virtual_ranks.FORMS) == set(STEP_ERRORS)


def test_a_pack_is_the_same_at_every_call():
    first, second = (make_pack((30, 0, 5), head_dim=64) for _ in range(2))
    assert all(torch.equal(first.problem.inputs[name], second.problem.inputs[name]) for name in NAMES)
    assert first.boundaries == [0, 30, 30, 35] and torch.equal(first.do, second.do)


def test_the_script_prints_a_table_and_prints_it_again(capsys, tmp_path):
    path = tmp_path / "rows.json"
    small = ["--device", "cpu", "--head-dim", "64", "--heads", "1", "--tokens", "90", "--packs", "Q2", "--ranks", "2"]
    assert virtual_ranks.main([*small, "--json", str(path)]) == 0
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith(("| softplus | Q2 ", "| slow | Q2 "))]
    assert len(rows) == len(json.loads(path.read_text())["rows"]) == 4
    assert virtual_ranks.main(["--table", str(path)]) == 0
    assert capsys.readouterr().out == text
