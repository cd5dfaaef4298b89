"""``list``: all kernel records."""

from __future__ import annotations

import argparse

from ..arch import FAMILIES
from ..catalog import registry
from .common import add_json, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("--family", choices=FAMILIES, help="only this family")
    parser.add_argument("--shipped", action="store_true", help="only records that stand in build.json")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the records, one a line."""
    records = registry().shipped() if arguments.shipped else registry().records()
    records = [record for record in records if arguments.family in (None, record.family)]
    if arguments.json:
        print_json([{**r.description(), "shipped": r.shipped, "archs": r.archs} for r in records])
        return 0
    rows = [("program", "variant", "family", "shipped", "targets")]
    rows += [(r.program, r.variant, r.family, "yes" if r.shipped else "test", " ".join(r.archs)) for r in records]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]]))
    return 0
