"""``report``: registers, spills, stack, shared memory, instructions and compile seconds per kernel and target."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..compiler import report
from ..compiler.progress import step
from ..compiler.roots import user_roots
from ..errors import ConfigError
from .common import add_json, print_json
from .table import print_table

_COLUMNS = {
    "registers": "registers",
    "spill_store_bytes": "spill st",
    "spill_load_bytes": "spill ld",
    "stack_bytes": "stack",
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
    rows = [r for r in rows if arguments.arch in (None, r.arch) and arguments.program in (None, r.program)]
    if not any(row.symbol for row in rows):
        return rows
    with step(f"counting the instructions of {len({row.library for row in rows})} libraries"):
        return report.add_instructions(rows)


def _print_rows(rows: list[report.Row]) -> None:
    lines = []
    for row in rows:
        numbers = [str(row.numbers.get(name, "-")) for name in _COLUMNS]
        seconds = "-" if row.seconds is None else f"{row.seconds:.1f}"
        mix = " ".join(f"{name} {number}" for name, number in row.instructions.items())
        reason = "-" if not row.note else "not counted"
        function = row.function.removeprefix(f"{row.program}__{row.variant}__") or "-"
        lines.append((row.program, row.variant, row.family, row.arch, function, *numbers, seconds, mix or reason))
    names = ("program", "variant", "family", "target", "kernel", *_COLUMNS.values(), "seconds", "instructions")
    print_table(names, lines, right=(*_COLUMNS.values(), "seconds"))
    for note in dict.fromkeys(row.note for row in rows if row.note):
        print(f"instructions not counted: {note}")


def _print_changes(changes: list[report.Change], arguments: argparse.Namespace) -> int:
    if arguments.json:
        print_json([_as_json(change) for change in changes])
        return 0
    for change in changes:
        name = " ".join(change.name).rstrip()
        if change.before is None or change.after is None:
            print(f"{name}: only in {arguments.diff[change.before is None]}")
            continue
        shown = (f"{field} {before} -> {after}" for field, (before, after) in change.changed.items())
        print(f"{name}: {', '.join(shown)}")
    print(f"{len(changes)} kernels differ")
    return 0


def _as_json(change: report.Change) -> dict[str, object]:
    only = None
    if change.before is None or change.after is None:
        only = "B" if change.before is None else "A"
    return {"kernel": list(change.name), "changed": change.changed, "only_in": only}
