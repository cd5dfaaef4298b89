"""``render``: the source of a record for a target."""

from __future__ import annotations

import argparse
import sys

from ..codegen import render as codegen
from .common import add_json, add_record, get_record, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    add_record(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the rendered text."""
    source = codegen.render(*get_record(arguments))
    if arguments.json:
        print_json({"filename": source.filename, "digest": source.digest, "templates": source.templates,
                    "text": source.text})  # fmt: skip
    else:
        sys.stdout.write(source.text)
    return 0
