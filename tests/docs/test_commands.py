"""The command lines of the documentation are ones that the command line takes; those that only look are run."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from importlib import import_module

import pytest

from cake_kda_jit.bench.command import MEASUREMENTS
from cake_kda_jit.cli import main
from cake_kda_jit.cli.command import _FORWARDED, _MODULES
from cake_kda_jit.demo.settings import make_parser

from .test_docs import FENCE, TEXTS, name_of, read

OURS = re.compile(r"python -m cake_kda_jit(?:\.bench)? ([^`\n&|]+)")
LOOKING = ("list", "render", "why", "env", "explain", "cache ls", "manifest --check", "bench pairs")
"""Verbs that compile nothing and change nothing."""


def commands(path) -> list[str]:
    """Every whole command of a page's shell blocks, without ``python -m cake_kda_jit``."""
    found = []
    for match in FENCE.finditer(read(path)):
        if match.group(1) in ("bash", "dockerfile"):
            for line in match.group(3).replace("\\\n", " ").splitlines():
                prefix = "bench " if "cake_kda_jit.bench " in line else ""
                found += [prefix + rest.split("#")[0].strip() for rest in OURS.findall(line)]
    return found


PAGES = [path for path in TEXTS if commands(path)]


def parse(verb: str, arguments: list[str]) -> None:
    """Read a verb's arguments as it would; argparse ends the process where it does not take them."""
    if verb == "bench":
        assert arguments[0] in MEASUREMENTS, arguments
        if options := {argument for argument in arguments if argument.startswith("--")}:
            with pytest.raises(SystemExit):
                import_module(f"cake_kda_jit.bench.{arguments[0]}").main(["--help"])
            return options
    elif verb in _FORWARDED:
        make_parser().parse_args(arguments)
    else:
        parser = argparse.ArgumentParser(prog=verb)
        import_module(f"cake_kda_jit.cli.{_MODULES.get(verb, verb)}").add_arguments(parser)
        parser.parse_args(arguments)
    return set()


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_are_taken(path, capsys):
    for command in commands(path):
        verb, *arguments = shlex.split(command)
        options = parse(verb, arguments)
        shown = capsys.readouterr().out
        for option in options:
            assert re.search(rf"{option}\b", shown), command


def test_commands_that_only_look_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack.json").write_text(json.dumps({"cu_seqlens": [0, 13, 18, 20]}), encoding="utf-8")
    found = {command for path in PAGES for command in commands(path) if command.startswith(LOOKING)}
    assert len(found) > 5
    for command in sorted(found):
        assert main(shlex.split(command)) == 0, command
        assert capsys.readouterr().out, command


def test_the_tutorials_script_is_run_by_the_examples():
    """`python docs/examples/...` in a block names a file that test_examples_run runs."""
    for path in TEXTS:
        for name in re.findall(r"^python (docs/\S+)$", read(path), re.MULTILINE):
            assert name.startswith("docs/examples/") and name.endswith(".py")
