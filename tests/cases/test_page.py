"""The pages of cases are true: their tests exist, every test of cases is on its page, tables are the scripts'."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cake_kda_jit.bench import pairs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGES = {"cases-attention.md": "test_attention_*.py", "cases-parallel.md": "test_parallel_cases.py"}


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def named_tests(page: str) -> list[tuple[str, str]]:
    """(file, test) of every test that a page names."""
    return re.findall(r"`([\w/.]+\.py)::(\w+)`", text_of(page))


@pytest.mark.parametrize("page", PAGES)
def test_every_case_names_tests_that_exist(page):
    for file, test in named_tests(page):
        path = ROOT / file if "/" in file else HERE / file
        assert f"def {test}(" in path.read_text(encoding="utf-8"), f"{file}::{test}"


@pytest.mark.parametrize("page, files", PAGES.items())
def test_every_test_of_a_case_is_on_the_page(page, files):
    named = {test for _, test in named_tests(page)}
    for path in HERE.glob(files):
        for test in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert test in named, f"{path.name}::{test}"


def test_the_pairs_are_those_of_the_script():
    assert text_of("cases-attention.md").endswith(pairs.table())
