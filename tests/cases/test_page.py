"""docs/cases-attention.md is true: its tests exist, every test here is on it, and its tables are the scripts'."""

from __future__ import annotations

import re
from pathlib import Path

from cake_kda_jit.bench import pairs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = (ROOT / "docs" / "cases-attention.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([\w/.]+\.py)::(\w+)`", PAGE)


def test_every_case_names_tests_that_exist():
    for file, test in NAMED:
        path = ROOT / file if "/" in file else HERE / file
        assert f"def {test}(" in path.read_text(encoding="utf-8"), f"{file}::{test}"


def test_every_test_of_a_case_is_on_the_page():
    named = {test for _, test in NAMED}
    for path in HERE.glob("test_attention_*.py"):
        for test in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert test in named, f"{path.name}::{test}"


def test_the_pairs_are_those_of_the_script():
    assert PAGE.endswith(pairs.table())
