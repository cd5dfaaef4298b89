"""``cache``: list, bound, verify and empty the user cache."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..compiler import gc
from ..compiler.roots import user_roots
from ..compiler.verify import verify_cache
from ..errors import ConfigError
from .common import add_json, print_json
from .table import print_table

ACTIONS = {
    "ls": "list the entries: size, last use, whether a process uses them",
    "gc": "remove least recently used entries until the cache is below its cap, and what dead builders left",
    "verify": "check size, digest and headers of every entry; damaged ones move to quarantine",
    "clear": "remove every entry that is not in use",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("action", choices=ACTIONS, help="; ".join(f"{name}: {what}" for name, what in ACTIONS.items()))
    parser.add_argument("--dir", help="the cache or prebuilt directory; default: the user cache")
    parser.add_argument("--max-bytes", type=int, help="for gc: the cap; default: CAKE_KDA_JIT_CACHE_MAX_BYTES")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Do it for each user cache; exit code 1 if verify finds damage."""
    if arguments.max_bytes is not None and (arguments.action != "gc" or arguments.max_bytes < 0):
        raise ConfigError("--max-bytes is a number of bytes, for `cache gc` only")
    roots = [Path(arguments.dir).absolute()] if arguments.dir else user_roots()
    if arguments.dir and not roots[0].is_dir():
        raise ConfigError(f"--dir {arguments.dir} is not a directory")
    act = {"ls": _ls, "gc": _gc, "verify": _verify, "clear": _gc}[arguments.action]
    results = [act(root, arguments) for root in roots]
    if arguments.json:
        print_json([value for value, _ in results])
    return 0 if all(good for _, good in results) else 1


def _ls(root: Path, arguments: argparse.Namespace) -> tuple[dict[str, object], bool]:
    entries = gc.list_entries(root)
    rows = [
        {
            "arch": entry.arch,
            "name": entry.name,
            "bytes": entry.num_bytes,
            "last_used": entry.last_used,
            "in_use": gc.is_in_use(entry),
        }
        for entry in entries
    ]
    total = sum(entry.num_bytes for entry in entries)
    if not arguments.json:
        lines = [(row["arch"], row["name"], f"{row['bytes'] / 1024:.0f}", _state(row)) for row in rows]
        if lines:
            print_table(("target", "entry", "KiB", "state"), lines, right=("KiB",))
        print(f"{len(rows)} entries, {total / 2**20:.1f} MiB in {root}")
    return {"root": str(root), "bytes": total, "entries": rows}, True


def _state(row: dict[str, object]) -> str:
    return "in use" if row["in_use"] else f"used {_ago(time.time() - row['last_used'])} ago"


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} seconds"


def _gc(root: Path, arguments: argparse.Namespace) -> tuple[dict[str, object], bool]:
    done = gc.clear(root) if arguments.action == "clear" else gc.collect(root, arguments.max_bytes)
    if not arguments.json:
        for name, why in done.kept.items():
            print(f"{name} stays: {why}")
        freed, left = done.freed_bytes / 2**20, done.num_bytes / 2**20
        print(f"removed {len(done.removed)}, {freed:.1f} MiB; {left:.1f} MiB are left in {root}")
    result = {"removed": done.removed, "kept": done.kept, "freed_bytes": done.freed_bytes, "bytes": done.num_bytes}
    return {"root": str(root), **result}, True


def _verify(root: Path, arguments: argparse.Namespace) -> tuple[dict[str, object], bool]:
    found = verify_cache(root, repair=not arguments.dir)
    if not arguments.json:
        for one in (*found.damaged, *found.stale):
            print(f"{one.directory}: {one.fault}" + (f"; {one.done}" if one.done else ""))
        print(f"{found.num_good} good, {len(found.stale)} of changed headers, {len(found.damaged)} damaged in {root}")
    rows = {kind: [one.as_json() for one in getattr(found, kind)] for kind in ("damaged", "stale")}
    return {"root": str(root), "good": found.num_good, **rows}, not found.damaged
