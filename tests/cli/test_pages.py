"""The pages about the compiler are true: tests, verbs, exceptions and options that they name exist."""

from __future__ import annotations

import argparse
import re
from importlib import import_module

import pytest

from cake_kda_jit import errors
from cake_kda_jit.cli.command import _FORWARDED, _MODULES, VERBS

from ..compiler.tiny import ROOT

DOCS = ROOT / "docs"


def rows(name: str) -> list[list[str]]:
    """The cells of all table rows of a page."""
    lines = (DOCS / name).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]


def test_every_case_names_tests_that_exist():
    named = 0
    for report, _, tests in rows("cases-compiler.md")[1:]:
        found = re.findall(r"`([\w/.]+)::(\w+)`", tests)
        assert found, report
        for file, test in found:
            path = ROOT / file if "/" in file else ROOT / "tests" / "compiler" / file
            assert f"def {test}(" in path.read_text(encoding="utf-8"), f"{file}::{test}"
            named += 1
    assert len(rows("cases-compiler.md")) - 1 == 30 and named > 60


def test_every_failure_is_in_the_table():
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, (errors.BuildError, errors.LoadError, errors.ConfigError))
    }
    named = {name for cells in rows("debugging.md") for name in re.findall(r"^`(\w+)`", cells[1])}
    assert kinds - {"BuildError"} <= named, "each has a row of its own"
    endings = "Error|Found|Mismatch|Arch|Output|Exceeded|Full|Timeout"
    for name in re.findall(rf"`(\w+(?:{endings}))`", str(rows("debugging.md"))):
        assert name in vars(errors), name


def options(verb: str) -> set[str]:
    parser = argparse.ArgumentParser(prog=verb)
    import_module(f"cake_kda_jit.cli.{_MODULES.get(verb, verb)}").add_arguments(parser)
    return {name for action in parser._actions for name in action.option_strings}


def test_every_verb_is_in_the_table_and_has_json():
    assert {cells[0].strip("`") for cells in rows("command-line.md")[1:]} == set(VERBS)
    for verb in VERBS.keys() - _FORWARDED.keys():
        assert "--json" in options(verb), verb


@pytest.mark.parametrize("page", ["command-line.md", "debugging.md", "build-and-cache.md", "prebuilt-in-containers.md"])
def test_options_in_commands_exist(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    for verb, rest in re.findall(r"python -m cake_kda_jit ([a-z]+)([^\n`]*)", text):
        assert verb in VERBS
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in options(verb), f"{verb} {option}"
