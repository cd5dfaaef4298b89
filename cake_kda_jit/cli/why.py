"""``why``: what a build of a record would use, and which field of its key differs from the nearest entry."""

from __future__ import annotations

import argparse
import json

from ..compiler.explain import Explanation, Neighbour, explain
from .common import add_json, add_record, get_record, print_json

_SHOWN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    add_record(parser)
    parser.add_argument("--all", action="store_true", help=f"show every entry, not the {_SHOWN} nearest")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print whether it is a hit, and the nearest entries with what differs. Compiles nothing."""
    record, arch = get_record(arguments)
    found = explain(record, arch)
    neighbours = found.neighbours if arguments.all else found.neighbours[:_SHOWN]
    if arguments.json:
        print_json(_as_json(found, neighbours))
        return 0
    print(f"{record.name} for {arch.name}: " + (f"found: {found.hit}" if found.hit else "would be compiled"))
    print(f"  source key {found.source_key}")
    print(f"  build key  {found.build_key or 'none: ' + found.toolchain_error.cause}")
    for line in () if found.hit else found.looked:
        print(f"  looked at {line}")
    for neighbour in neighbours:
        print(f"  {neighbour.layer} {neighbour.directory}: {_verdict(neighbour)}")
        for one in neighbour.differences:
            print(f"    {one.field}: {_short(one.entry)} there, {_short(one.now)} now")
    if not found.neighbours:
        print(f"  no layer has an entry of {record.symbol} for {arch.name}")
    return 0


def _verdict(neighbour: Neighbour) -> str:
    if neighbour.fault:
        return f"unusable: {neighbour.fault}"
    number = len(neighbour.differences)
    return f"{number} field{'s differ' if number > 1 else ' differs'}" if number else "the same"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    is_digest = len(text) == 64 and all(c in "0123456789abcdef" for c in text)
    return text[:12] if is_digest else text


def _as_json(found: Explanation, neighbours: tuple[Neighbour, ...]) -> dict[str, object]:
    return {
        "hit": found.hit,
        "source_key": found.source_key,
        "build_key": found.build_key,
        "toolchain_error": found.toolchain_error.cause if found.toolchain_error else None,
        "looked": list(found.looked),
        "neighbours": [
            {
                "directory": str(one.directory),
                "layer": one.layer,
                "fault": one.fault,
                "differences": [{"field": d.field, "entry": d.entry, "now": d.now} for d in one.differences],
            }
            for one in neighbours
        ],
    }
