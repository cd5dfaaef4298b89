"""``manifest``: write build.json and build.test.json from the registry, or check that they are current."""

from __future__ import annotations

import argparse

from ..compiler import manifest
from .common import add_json, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="write what has changed")
    what.add_argument("--check", action="store_true", help="exit with 1 if a file is not current")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write or check the two files; lists those that changed or are not current."""
    found = manifest.write_manifests() if arguments.write else manifest.outdated_manifests()
    if arguments.json:
        print_json({"written" if arguments.write else "outdated": [str(path) for path in found]})
    elif arguments.write:
        print("\n".join(f"wrote {path}" for path in found) or "both manifests were current")
    else:
        print("\n".join(f"{path} is not current; run `manifest --write`" for path in found) or "both are current")
    return 1 if arguments.check and found else 0
