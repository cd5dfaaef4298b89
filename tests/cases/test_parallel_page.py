"""docs/cases-parallel.md is true: its tests exist, and every test of these cases is on it."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = (ROOT / "docs" / "cases-parallel.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([\w/.]+\.py)::(\w+)`", PAGE)


def test_every_case_names_tests_that_exist():
    for file, test in NAMED:
        path = ROOT / file if "/" in file else HERE / file
        assert f"def {test}(" in path.read_text(encoding="utf-8"), f"{file}::{test}"


def test_every_test_of_a_case_is_on_the_page():
    named = {test for _, test in NAMED}
    for test in re.findall(r"^def (test_\w+)\(", (HERE / "test_parallel_cases.py").read_text("utf-8"), re.MULTILINE):
        assert test in named, test
