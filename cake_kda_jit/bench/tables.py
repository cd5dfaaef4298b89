"""What the measurements of errors share: their options, and a table printed from rows or again from their file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .core import make_report, write_report

Json = dict[str, Any]


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a measurement, by its module's name: --device, --json and --table."""
    name = module.rpartition(".")[2]
    parser = argparse.ArgumentParser(prog=f"cake-kda-jit bench {name}", description=description)
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--table", type=Path, help="print the table of this file, and measure nothing")
    return parser


def print_again(path: Path, text_of: Callable[[Json], str]) -> int:
    """Print the table of a file that was written before; returns 0."""
    print(text_of(json.loads(path.read_text(encoding="utf-8"))), end="")
    return 0


def publish(options: argparse.Namespace, what: str, module: str, rows: Sequence[Any], text_of: Callable[[Json], str]):
    """Print the rows' table, and write their file if one is asked for."""
    script = f"cake_kda_jit.bench {module.rpartition('.')[2]}"
    print(text_of(make_report(what, script, options.device, rows)), end="")
    if options.json:
        write_report(options.json, what, script, options.device, rows)


def titled(report: Json, table: str) -> str:
    """Return a table below what its report is of, where it was measured and when."""
    machine = report["machine"]
    return f"{report['what']}; {machine['device']}, torch {machine['torch']}, {report['date']}.\n\n{table}"
