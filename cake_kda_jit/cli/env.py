"""``env``: every environment variable that this package reads."""

from __future__ import annotations

import argparse

from .. import config
from ..errors import ConfigError
from .common import add_json, print_json


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
        width = max(len(row["name"]) for row in rows)
        for row in rows:
            shown = row["error"] or f"{row['value']!r}{'' if row['set'] else ' (default)'}"
            print(f"{row['name'].ljust(width)}  {shown}  # {row['doc']}; {row['accepts']}")
    return 1 if any(row["error"] for row in rows) else 0


def _row(knob: config.Knob) -> dict[str, object]:
    row = {"name": knob.name, "accepts": knob.accepts, "doc": knob.doc, "default": knob.default, "error": None}
    try:
        row["value"] = config.read(knob.name)
    except ConfigError as error:
        row["value"], row["error"] = None, str(error)
    return {**row, "set": config.is_set(knob.name)}
