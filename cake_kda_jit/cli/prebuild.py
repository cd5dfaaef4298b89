"""``prebuild``: compile a manifest's records into a directory for machines without a compiler."""

from __future__ import annotations

import argparse
import sys

from ..compiler.manifest import Prebuilt, prebuild
from ..errors import ConfigError
from ..paths import manifest_path
from .common import add_json, named_arch, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("--manifest", default=str(manifest_path(shipped=True)), help="default: the shipped records")
    parser.add_argument("--arch", required=True, nargs="+", help="targets, e.g. x86_64_v3 sm_90a")
    parser.add_argument("--out", required=True, help="the directory to name in CAKE_KDA_JIT_PREBUILT")
    parser.add_argument("--jobs", type=int, help="compilations at a time; default: by cores and memory")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Build all and say what became of each; exit code 1 if one failed or nothing was built."""
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ConfigError(f"--jobs {arguments.jobs} is not valid; accepted: a positive integer")
    archs = [named_arch(name) for name in arguments.arch]
    results = prebuild(arguments.manifest, archs, arguments.out, jobs=arguments.jobs)
    for one in results:
        if one.error:
            verdict = "skipped" if one.is_skipped else "failed"
            print(f"{verdict} {one.record.name} for {one.arch}: {one.error}", file=sys.stderr)
    built = [one for one in results if one.directory]
    if arguments.json:
        print_json([_row(one) for one in results])
    else:
        print(f"{len(built)} of {len(results)} kernels are in {arguments.out}")
    return 0 if built and not any(one.is_failed for one in results) else 1


def _row(one: Prebuilt) -> dict[str, object]:
    return {
        "record": one.record.name,
        "arch": one.arch,
        "directory": str(one.directory) if one.directory else None,
        "skipped": one.is_skipped,
        "error": one.error.cause if one.error else None,
    }
