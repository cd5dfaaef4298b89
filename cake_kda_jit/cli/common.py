"""What several verbs share: JSON output and the choice of a record."""

from __future__ import annotations

import argparse
import json

from ..arch import FAMILIES, Arch, get_arch
from ..catalog import registry
from ..errors import ConfigError, UnsupportedArch
from ..record import Record


def print_json(value: object) -> None:
    """Print a value as JSON, sorted and indented."""
    print(json.dumps(value, indent=2, sort_keys=True))


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON, on standard output alone")


def add_record(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a record and a target."""
    parser.add_argument("program", help="e.g. chunk_scan")
    parser.add_argument("variant", help="e.g. bf16_k128")
    parser.add_argument("--arch", required=True, help="the target, e.g. x86_64_v3 or sm_90a")
    parser.add_argument("--family", choices=FAMILIES, help="default: the target's best that has the variant")


def get_record(arguments: argparse.Namespace) -> tuple[Record, Arch]:
    """Return the record and the target that the arguments name; raises ConfigError with what there is."""
    arch = named_arch(arguments.arch)
    families = (arguments.family,) if arguments.family else arch.families
    for family in families:
        for record in registry().records():
            if (record.program, record.variant, record.family) == (arguments.program, arguments.variant, family):
                return record, arch
    programs = {record.program for record in registry().records()}
    near = [r.name for r in registry().records() if r.program == arguments.program and r.family in arch.families]
    known = f"records of it for {arch.name}: {', '.join(near)}" if near else f"programs: {', '.join(sorted(programs))}"
    raise ConfigError(f"no record {arguments.program} {arguments.variant} in {' or '.join(families)}; {known}")


def named_arch(name: str) -> Arch:
    """Return a target by name; an unknown name is wrong use."""
    try:
        return get_arch(name)
    except UnsupportedArch as error:
        raise ConfigError(f"{error.cause}; {error.hint}") from None
