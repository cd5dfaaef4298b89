"""Choose the verb. Each verb's module is imported only when it is named."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..errors import CakeKdaError, ConfigError

# verb -> what it does. A verb's module has its name; a verb's own options stand there.
VERBS = {
    "doctor": "test compilers, cache and settings of this machine, and say what to do",
    "list": "list all kernel records, and for which targets they are built",
    "render": "print the source of a record for a target",
    "prebuild": "compile a manifest's records into a directory or into wheels",
    "manifest": "write build.json and build.test.json, or check that they are current",
    "why": "say what a kernel's build would use, and which field of its key differs from the nearest entry",
    "cache": "list, bound, verify or empty the cache of compiled kernels",
    "report": "show registers, spills, shared memory and compile seconds of compiled kernels",
    "toolchain": "list the compilers found, or install nvcc from Python packages",
    "env": "show every environment variable, its value and its default",
    "explain": "show which rank would hold which tokens of a pack, and what each fragment needs from other ranks",
    "bench": "run one measurement of the kernels; `bench` alone lists them",
    "demo": "train a small language model on packed documents",
}
# These read their own command line.
_FORWARDED = {"bench": "cake_kda_jit.bench.command", "demo": "cake_kda_jit.demo"}
_MODULES = {"list": "list_records"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb, of the process's own command line by default; returns 0, 1 when it failed, 2 for wrong use."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        return _fail(argv, error, 2)
    except CakeKdaError as error:
        return _fail(argv, error, 1)
    except BrokenPipeError:
        # The reader of a pipe has seen enough.
        _drop_what_cannot_be_written()
        return 0
    except OSError as error:
        _drop_what_cannot_be_written()
        where = f": {error.filename}" if error.filename else ""
        return _fail(argv, f"{error.strerror or error}{where}", 1)
    except KeyboardInterrupt:
        return _fail(argv, "interrupted", 1)


def _run(argv: list[str]) -> int:
    if argv and argv[0] in _FORWARDED:
        return import_module(_FORWARDED[argv[0]]).main(argv[1:])
    parser = argparse.ArgumentParser(prog="cake-kda-jit", description="Kernels of Kimi Delta Attention, compiled here.")
    parser.add_argument("--version", action="version", version=f"cake-kda-jit {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, summary in VERBS.items():
        sub = verbs.add_parser(verb, help=summary, description=summary, add_help=verb not in _FORWARDED)
        if argv and argv[0] == verb:
            module = import_module(f"{__package__}.{_MODULES.get(verb, verb)}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:
        return 2 if stop.code else 0
    return arguments.run(arguments)


def _fail(argv: list[str], why: object, status: int) -> int:
    print(f"cake-kda-jit {' '.join(argv[:1])}: {why}", file=sys.stderr)
    return status


def _drop_what_cannot_be_written() -> None:
    """Let nothing that a stream refuses be tried again, with a traceback, when the process ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
