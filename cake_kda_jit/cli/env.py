"""``env``: every environment variable that this package reads."""

from __future__ import annotations

import argparse
import os

from .. import config
from ..errors import ConfigError
from .common import add_json, print_json
from .table import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("--markdown", action="store_true", help="print the documentation's table")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print each variable with its value; exit code 1 if one is malformed."""
    if arguments.markdown:
        print(config.table(), end="")
        return 0
    rows = [_row(knob) for knob in config.KNOBS]
    if arguments.json:
        print_json(rows)
    else:
        lines = [(row["name"], _value(row), row["doc"], row["accepts"]) for row in rows]
        print_table(("variable", "value", "what it does", "accepts"), lines)
    return 1 if any(row["error"] for row in rows) else 0


def _value(row: dict[str, object]) -> str:
    if row["error"]:
        return row["error"]
    value = row["value"]
    if isinstance(value, tuple):
        value = os.pathsep.join(value)
    shown = "unset" if value in (None, "") else str(int(value) if isinstance(value, bool) else value)
    return shown if row["set"] else f"{shown} (default)"


def _row(knob: config.Knob) -> dict[str, object]:
    row = {"name": knob.name, "accepts": knob.accepts, "doc": knob.doc, "default": knob.default, "error": None}
    try:
        row["value"] = config.read(knob.name)
    except ConfigError as error:
        row["value"], row["error"] = None, str(error)
    return {**row, "set": config.is_set(knob.name)}
