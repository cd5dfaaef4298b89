"""``toolchain``: which compilers are found, in which order and why; and installing one from Python packages."""

from __future__ import annotations

import argparse

from ..compiler.check import check_host_limit, check_parts
from ..compiler.discover import all_nvccs, find_host_compiler
from ..compiler.doctor import arch_matrix
from ..compiler.pip_toolchain import DEFAULT_VERSION, install_toolchain, requirements, toolchain_directory
from ..compiler.toolchain import Tool, Toolchain
from ..errors import BuildError, ConfigError
from .common import add_json, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("action", choices=("list", "install"), help="list: what is found; install: nvcc from packages")
    parser.add_argument("--version", help=f"for install: the CUDA release, default {DEFAULT_VERSION}")
    parser.add_argument("--force", action="store_true", help="for install: replace the one that is there")
    parser.add_argument("--dry-run", action="store_true", help="for install: say what would be installed, and where")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """List or install; exit code 1 if no usable nvcc results."""
    if arguments.action == "list":
        if arguments.version or arguments.force or arguments.dry_run:
            raise ConfigError("--version, --force and --dry-run belong to `toolchain install`")
        return _list(arguments)
    version = arguments.version or DEFAULT_VERSION
    if arguments.dry_run:
        plan = {"packages": requirements(version), "directory": str(toolchain_directory() / f"cuda-{version}")}
        print_json(plan) if arguments.json else print(f"{' '.join(plan['packages'])} into {plan['directory']}")
        return 0
    tool = install_toolchain(version, force=arguments.force)
    known, unknown = arch_matrix(tool)
    if arguments.json:
        print_json({"path": tool.path, "version": tool.identity["version"], "known": known, "unknown": unknown})
    else:
        print(f"nvcc {tool.identity['version']} at {tool.path}, for {' '.join(known)}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    host = find_host_compiler()
    rows, used = [], None
    for place, tool, error in all_nvccs(host):
        is_used = used is None and (tool is not None or error is not None)
        used = used or tool or error
        rows.append({"place": place.reason, "used": is_used, **_facts(host, tool, error, place.path)})
    if arguments.json:
        print_json({"host": {"path": host.path, **host.identity}, "nvcc": rows})
    else:
        print(f"host compiler: {host.path}, {host.identity['version']}")
        for row in rows:
            mark = "*" if row["used"] else " "
            says = row["error"] or (f"nvcc {row['version']} at {row['path']}" if row["path"] else "none")
            print(f"{mark} {row['place']}: {says}")
            if row["known"]:
                unknown = f"; not {' '.join(row['unknown'])}" if row["unknown"] else ""
                print(f"    {' '.join(row['known'])}{unknown}")
    return 0 if isinstance(used, Tool) else 1


def _facts(host: Tool, tool: Tool | None, error: BuildError | None, path: str | None) -> dict[str, object]:
    if tool is None:
        return {"path": path, "version": None, "known": [], "unknown": [], "error": error.cause if error else None}
    known, unknown = arch_matrix(tool)
    try:
        check_parts(tool)
        check_host_limit(Toolchain(host, tool))
    except BuildError as fault:
        error = fault
    version = tool.identity["version"]
    cause = error.cause if error else None
    return {"path": tool.path, "version": version, "known": known, "unknown": unknown, "error": cause}
