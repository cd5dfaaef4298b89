"""``report``: registers, spills, shared memory and compile seconds per program and target."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..compiler import report
from ..compiler.roots import user_roots
from ..errors import ConfigError
from .common import add_json, print_json

_COLUMNS = {
    "registers": "registers",
    "spill_store_bytes": "spill st",
    "spill_load_bytes": "spill ld",
    "shared_bytes": "static smem",
    "library_bytes": "library",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("--dir", help="a cache or prebuilt directory; default: the user cache")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="compare two directories, e.g. two nvccs' builds")
    parser.add_argument("--arch", help="only this target")
    parser.add_argument("--program", help="only this program")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a table, or what differs between two directories; exit code 1 if one has no kernels to show."""
    if arguments.diff:
        if arguments.dir:
            raise ConfigError("--diff names both directories; --dir does not go with it")
        before, after = (_rows(Path(directory), arguments) for directory in arguments.diff)
        return _print_changes(report.compare(before, after), arguments)
    root = Path(arguments.dir) if arguments.dir else next((r for r in user_roots() if r.is_dir()), user_roots()[0])
    rows = _rows(root, arguments)
    if arguments.json:
        print_json([row.as_json() for row in rows])
    else:
        _print_rows(rows)
    return 0 if rows else 1


def _rows(directory: Path, arguments: argparse.Namespace) -> list[report.Row]:
    rows = report.read_reports(directory)
    return [r for r in rows if arguments.arch in (None, r.arch) and arguments.program in (None, r.program)]


def _print_rows(rows: list[report.Row]) -> None:
    table = [("program", "variant", "target", "kernel", *_COLUMNS.values(), "seconds")]
    for row in rows:
        numbers = [str(row.numbers.get(name, "-")) for name in _COLUMNS]
        seconds = "-" if row.seconds is None else f"{row.seconds:.1f}"
        table.append((row.program, row.variant, row.arch, row.function or "-", *numbers, seconds))
    widths = [max(map(len, column)) for column in zip(*table)]
    for cells in table:
        left = [cell.ljust(width) for cell, width in zip(cells[:4], widths)]
        print("  ".join([*left, *(cell.rjust(width) for cell, width in zip(cells[4:], widths[4:]))]))


def _print_changes(changes: list[report.Change], arguments: argparse.Namespace) -> int:
    if arguments.json:
        print_json([{"kernel": list(change.name), "changed": change.changed()} for change in changes])
        return 0
    for change in changes:
        program, variant, arch, function = change.name
        name = f"{program} {variant} {arch} {function}".rstrip()
        if change.before is None or change.after is None:
            print(f"{name}: only in {arguments.diff[change.before is None]}")
            continue
        shown = (f"{field} {before} -> {after}" for field, (before, after) in change.changed().items())
        print(f"{name}: {', '.join(shown)}")
    print(f"{len(changes)} kernels differ")
    return 0
