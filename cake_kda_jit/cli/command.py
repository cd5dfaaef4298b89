"""Choose the verb. Each verb's module is imported only when it is named."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

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
    "demo": "train a small language model on packed documents",
}
_FORWARDED = {"demo": "cake_kda_jit.demo"}
_MODULES = {"list": "list_records"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb, of the process's own command line by default; returns 0, 1 when it failed, 2 for wrong use."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in _FORWARDED:
        return import_module(_FORWARDED[argv[0]]).main(list(argv[1:]))
    parser = argparse.ArgumentParser(prog="cake-kda-jit", description="Kernels of Kimi Delta Attention, compiled here.")
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
    try:
        return arguments.run(arguments)
    except ConfigError as error:
        print(f"cake-kda-jit {arguments.verb}: {error}", file=sys.stderr)
        return 2
    except CakeKdaError as error:
        print(f"cake-kda-jit {arguments.verb}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of a pipe has seen enough; nothing may be flushed to it any more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        print(f"cake-kda-jit {arguments.verb}: {error.strerror or error}{where}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"cake-kda-jit {arguments.verb}: interrupted", file=sys.stderr)
        return 1
