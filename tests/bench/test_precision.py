"""The tables of errors and of compared bytes: what they measure, what they call too much, and where they stand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from cake_kda_jit.bench import determinism, numerics, precision
from cake_kda_jit.bench.precision import COLUMNS, PARAMETERS, WHOLE, Case, Row, compute, parameter_shares, rows_of
from cake_kda_jit.bench.problems import (
    LOCAL_FACTOR,
    REGIMES,
    chunk_reference,
    local_errors,
    make_problem,
    parameter_deviations,
    reference,
)
from cake_kda_jit.errors import ConfigError

CPU = torch.device("cpu")
LENGTHS = (65, 0, 1, 70)


@pytest.mark.parametrize("regime", REGIMES)
def test_the_chunk_form_is_the_recurrence(regime):
    """Both in FP64, every output and gradient: what is left is rounding by 1e-16, over 70 tokens."""
    problem = make_problem(LENGTHS, regime=regime, value_heads=4)
    found, expected = chunk_reference(problem), reference(problem)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-11 * tensor.norm(), name


def test_rows_of_the_packs(monkeypatch):
    """The cpu family keeps fp32 tiles: o rounds once to bf16, 1.66e-3, and the states are exact to 1e-6."""
    monkeypatch.setattr(precision, "LENGTHS", LENGTHS)
    rows = {row.output: row for row in rows_of(Case("weak", 64), CPU, torch.bfloat16)}
    assert tuple(rows) == COLUMNS
    assert 1.4e-3 < rows["o"].error < 1.9e-3 and rows["final_state"].error < 1e-6
    for row in rows.values():
        assert row.case == "weak, 64" and row.error <= row.budget
        if row.output in PARAMETERS:
            assert row.tokens is None and row.worst <= row.error and 0 < row.share <= row.error / row.budget
        else:
            assert row.tokens in LENGTHS and row.worst >= row.error * 0.99


def test_a_part_of_terms_that_cancel_is_relative_to_their_norm():
    """One token's sum of 1e-3 over terms of norm 2, off by 2e-3: an error of 1e-3, beside a pack of typical size 1."""
    problem = make_problem((1, 64), heads=1)
    expected = torch.ones(1, 65, 1, dtype=torch.float64)
    expected[0, 0] = 1e-3
    found, terms = expected.clone(), torch.full_like(expected, 2.0)
    found[0, 0] += 2e-3
    [(_, _, typical), _] = local_errors("dbeta", found, expected, problem)
    [(_, _, of_terms), _] = local_errors("dbeta", found, expected, problem, terms)
    assert typical == pytest.approx(2e-3, rel=0.02) and of_terms == pytest.approx(1e-3)


def test_copies_of_a_head_are_computed_beside_each_other(monkeypatch):
    case = Case("bounded", 64, tokens=130, copies=3, gradients=False)
    assert case.name == "bounded, 64, T 130, HV 6"
    assert [row.output for row in rows_of(case, CPU, torch.bfloat16)] == ["o", "final_state"]
    problem = make_problem((130,))
    alone = compute(replace(case, copies=1), problem)
    found = compute(case, problem)
    assert all(torch.equal(found[name], alone[name]) for name in alone)

    def wrong(*inputs, **keywords):
        o, state = kda(*inputs, **keywords)
        o[0, 5, 2, 0] += 1
        return o, state

    kda = precision.chunk_kda
    monkeypatch.setattr(precision, "chunk_kda", wrong)
    with pytest.raises(RuntimeError, match="copies of a head differ"):
        compute(case, problem)


def test_the_longest_document_of_many_heads_has_more_elements_than_31_bits_count():
    case = max(precision.LONG, key=lambda case: (case.tokens, case.copies))
    assert case.tokens * case.heads * case.copies * case.head_dim > 2**31


@pytest.mark.parametrize(
    ("changes", "cell"),
    [
        ({}, "| 2.00 / 2.50 (200) / 3.6 |"),
        ({"error": 3.7e-3}, "| **3.70 / 2.50 (200) / 3.6** |"),
        ({"worst": 1.01 * LOCAL_FACTOR * 3.6e-3}, "| **2.00 / 5.45 (200) / 3.6** |"),
    ],
)
def test_a_cell_says_what_is_over_its_budget(changes, cell):
    row = replace(Row("bounded, 64", "o", 2e-3, 2.5e-3, 200, 3.6e-3), **changes)
    assert cell in precision.table([asdict(row)])


def test_of_several_seeds_the_worst_counts():
    one = Row("bounded, 64", "o", 2e-3, 2.5e-3, 200, 3.6e-3)
    [row] = precision.worst_of([[one], [replace(one, error=3e-3, worst=2.4e-3, tokens=1)]])
    assert (row.error, row.worst, row.tokens) == (3e-3, 2.5e-3, 200)
    one = Row("bounded, 64", "dA_log", 2e-4, 1e-4, None, 3e-4, share=0.4, relative=2e-3)
    [row] = precision.worst_of([[one], [replace(one, worst=2e-4, share=0.3, relative=5e-3)]])
    assert (row.error, row.worst, row.share, row.relative) == (2e-4, 2e-4, 0.4, 5e-3)


@pytest.mark.parametrize(("share", "cell"), [(0.4, "0.40"), (1.01, "**1.01**")])
def test_a_sum_says_whether_it_is_over_its_bound(share, cell):
    row = Row("bounded, 64", "dA_log", 2e-4, 1e-4, None, 3e-4, share, 2e-3)
    [line] = precision.table_of_sums([asdict(row)]).splitlines()[2:]
    assert line == f"| bounded, 64 | 0.20 | 2.00 | {cell} |"


@pytest.mark.parametrize("regime", REGIMES)
def test_what_a_sum_may_be_off_by(regime):
    """3e-4 of its absolute terms and three deviations; over all channels, in norm, one deviation of each."""
    problem = make_problem(LENGTHS, regime=regime)
    expected, deviations = chunk_reference(problem), parameter_deviations(problem, regime)
    sums = precision.parameter_terms(expected, problem)
    assert parameter_shares(expected, expected, problem, regime) == dict.fromkeys((*PARAMETERS, WHOLE), 0)
    one = expected["ddt_bias"].clone()
    one[70] += 3e-4 * sums["ddt_bias"][70] + 3 * deviations["ddt_bias"][70]
    shares = parameter_shares({**expected, "ddt_bias": one}, expected, problem, regime)
    assert shares["ddt_bias"] == pytest.approx(1) and shares["dA_log"] == 0 and shares[WHOLE] < 1
    every = {name: expected[name] - 3e-4 * sums[name] - deviations[name] for name in PARAMETERS}
    shares = parameter_shares({**expected, **every}, expected, problem, regime)
    assert shares[WHOLE] == pytest.approx(1) and 1 / 3 < shares["dA_log"] < 1 and 1 / 3 < shares["ddt_bias"] < 1


@pytest.mark.parametrize(("module", "options"), [(precision, ("--seeds", "1")), (determinism, ("--runs", "1"))])
def test_a_table_is_printed_and_printed_again_from_its_file(module, options, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(precision, "PACKS", (Case("weak", 64),))
    monkeypatch.setattr(determinism, "LENGTHS", (130, 1))
    monkeypatch.setattr(determinism, "NEIGHBOUR", 66)
    path = tmp_path / "rows.json"
    assert module.main([*options, "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert module.text_of(json.loads(path.read_text())) == text
    page = f"before\n<!-- table of {path.name}: written by `bench performance` -->\nold\n<!-- /table -->\nbehind\n"
    shown = numerics.with_tables(page, tmp_path)
    assert shown.startswith(page.partition("old")[0]) and shown.endswith(page.partition("old")[2])
    what, table = text.split("\n\n", 1)
    assert f"\n\n{table}\n<!-- /table -->" in shown and what in shown.replace("\n", " ")
    assert max(map(len, (line for line in shown.splitlines() if not line.startswith("|")))) < 120


def test_a_byte_that_differs_is_found(monkeypatch, capsys):
    """A step whose third run is another one in a single element."""
    runs, true_step = [], determinism.step

    def step(*given):
        found = true_step(*given)
        runs.append(found)
        if len(runs) == 3:
            found["dg"][0, 40, 1, 5] = found["dg"][0, 40, 1, 5] + 1
        return found

    monkeypatch.setattr(determinism, "step", step)
    monkeypatch.setattr(determinism, "LENGTHS", (130, 1))
    monkeypatch.setattr(determinism, "NEIGHBOUR", 66)
    assert determinism.main(["--runs", "2"]) == 1
    [line] = (line for line in capsys.readouterr().out.splitlines() if line.endswith("| 1 |"))
    assert "| saved, whole documents | again | 2 |" in line


def test_a_difference_of_sign_of_zero_or_of_nan_counts():
    zero, nan = torch.zeros(3), torch.full((3,), torch.nan)
    assert determinism.differing({"o": zero}, {"o": -zero}) == 3
    assert determinism.differing({"o": nan}, {"o": nan.clone()}) == 0
    with pytest.raises(ValueError, match="outputs are o; compared with dq"):
        determinism.differing({"o": zero}, {"dq": zero})


def test_a_table_without_a_file_is_refused(tmp_path):
    page = "<!-- table of none.json: written by `bench performance` -->\n<!-- /table -->\n"
    with pytest.raises(ConfigError, match=r"none\.json, which is not there"):
        numerics.with_tables(page, tmp_path)
    (tmp_path / "none.json").write_text(json.dumps({"script": "cake_kda_jit.bench walk"}))
    with pytest.raises(ConfigError, match="written by 'walk'; tables are made of files of determinism, precision"):
        numerics.with_tables(page, tmp_path)
