"""``prebuild``: compile a manifest's records into a directory, or into wheels, for machines without a compiler."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .. import __version__
from ..compiler.manifest import Prebuilt, prebuild, prebuild_wheels
from ..errors import ConfigError
from ..paths import manifest_path
from .common import add_json, named_arch, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    shipped = str(manifest_path(shipped=True))
    parser.add_argument("--manifest", default=shipped, help="default: the shipped records; or build.test.json")
    parser.add_argument("--arch", required=True, nargs="+", help="targets, e.g. x86_64_v3 sm_90a")
    parser.add_argument("--out", required=True, help="where to: the directory for CAKE_KDA_JIT_PREBUILT, or for wheels")
    parser.add_argument("--wheel", action="store_true", help="write a wheel a target, of shipped records only")
    parser.add_argument("--jobs", type=int, help="compilations at a time; default: by cores and memory")
    parser.add_argument("--keep-going", action="store_true", help="after a failure, build the others all the same")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Build all and say what became of each; exit code 1 if one failed or nothing was built."""
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ConfigError(f"--jobs {arguments.jobs} is not valid; accepted: a positive integer")
    if arguments.wheel and Path(arguments.manifest).resolve() != manifest_path(shipped=True).resolve():
        raise ConfigError("--wheel packs the records of build.json; test-only records are in no wheel")
    archs = [named_arch(name) for name in arguments.arch]
    options = {"jobs": arguments.jobs, "keep_going": arguments.keep_going}
    wheels: list[Path] = []
    if arguments.wheel:
        results, wheels = prebuild_wheels(archs, arguments.out, __version__, **options)
    else:
        results = prebuild(arguments.manifest, archs, arguments.out, **options)
    for one in results:
        if one.error:
            verdict = "skipped" if one.is_skipped else "failed"
            print(f"{verdict} {one.record.name} for {one.arch}: {one.error}", file=sys.stderr)
    built = [one for one in results if one.directory]
    if arguments.json:
        rows = [_row(one, is_packed=arguments.wheel) for one in results]
        print_json({"kernels": rows, "wheels": [str(path) for path in wheels]} if arguments.wheel else rows)
    elif arguments.wheel:
        print("\n".join(f"wrote {path}" for path in wheels) or "no wheel was written")
    else:
        print(f"{len(built)} of {len(results)} kernels are in {arguments.out}")
    return 0 if built and not any(one.is_failed for one in results) else 1


def _row(one: Prebuilt, *, is_packed: bool) -> dict[str, object]:
    return {
        "record": one.record.name,
        "arch": one.arch,
        "directory": str(one.directory) if one.directory and not is_packed else None,
        "origin": one.origin or None,
        "skipped": one.is_skipped,
        "error": one.error.cause if one.error else None,
    }
