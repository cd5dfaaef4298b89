"""``list``: all kernel records, which are shipped, and for which targets they are built."""

from __future__ import annotations

import argparse

from ..arch import FAMILIES
from ..catalog import registry
from ..compiler.lookup import is_built
from .common import add_json, named_arch, print_json
from .table import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("--family", choices=FAMILIES, help="only this family")
    parser.add_argument("--shipped", action="store_true", help="only records that stand in build.json")
    parser.add_argument("--arch", help="only records and states of this target")
    parser.add_argument("--built", action="store_true", help="only records that are built for one of the targets")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the records, one a line; a target for which some layer has the kernel is marked with ``*``."""
    chosen = named_arch(arguments.arch).name if arguments.arch else None
    rows = []
    for record in registry().shipped() if arguments.shipped else registry().records():
        archs = [name for name in record.archs if chosen in (None, name)]
        if arguments.family in (None, record.family) and archs:
            built = [name for name in archs if is_built(record, name)]
            if built or not arguments.built:
                rows.append((record, archs, built))
    if arguments.json:
        print_json([{**r.description(), "shipped": r.shipped, "archs": a, "built": b} for r, a, b in rows])
        return 0
    lines = []
    for record, archs, built in rows:
        marked = " ".join(name + "*" if name in built else name for name in archs)
        state = "shipped" if record.shipped else "test-only"
        lines.append((record.program, record.variant, record.family, state, marked))
    print_table(("program", "variant", "family", "state", "targets (* built)"), lines)
    return 0
