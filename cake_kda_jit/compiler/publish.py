"""From a finished staging directory to an entry: validate, describe, make durable, rename."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

from ..errors import EmptyOutput
from . import cache
from .artifact import DEPENDENCIES, PROVENANCE, REPORT, Artifact, library_name
from .diagnose import Place, check_limits, resources
from .elf import NotALibrary, SharedLibrary, read_library
from .flags import DEPFILE
from .key import SCHEMA, file_digest
from .memo import stat_of
from .request import Request

ENTRY_FUNCTIONS = ("", "__run", "__grid", "__abi", "__error")


def validate(request: Request, staging: Path, place: Place) -> SharedLibrary:
    """Return the parsed library; raises EmptyOutput if the compiler's success was none.

    On a full disk nvcc can return 0 and leave an empty file.
    """
    record = request.record
    path = staging / library_name(record)
    what = f"the compiler returned success for {record.name} for {request.arch.name}, but its output"
    parts = {"log": place.log, "reproduction": place.reproduction, "hint": "is the disk full?"}
    if not path.is_file():
        raise EmptyOutput(f"{what} is missing", **parts)
    if path.stat().st_size == 0:
        raise EmptyOutput(f"{what} is empty", **parts)
    try:
        library = read_library(path)
    except NotALibrary as error:
        raise EmptyOutput(f"{what} is {error}", **parts) from None
    missing = [record.symbol + suffix for suffix in ENTRY_FUNCTIONS if record.symbol + suffix not in library.functions]
    if missing:
        parts["hint"] = "does the template include host/entry.jinja?"
        raise EmptyOutput(f"{what} does not export {', '.join(missing)}", **parts)
    if not library.returns_constant(f"{record.symbol}__abi", record.entry.abi):
        parts["hint"] = "does the template include host/entry.jinja?"
        raise EmptyOutput(f"{what} exports another argument layout than {record.entry.abi:016x}", **parts)
    return library


def describe(request: Request, staging: Path, library: SharedLibrary, log: str, seconds: float, place: Place) -> None:
    """Write report, dependency manifest and provenance into the staging directory; checks the record's limits."""
    record = request.record
    kernels = resources(log)
    check_limits(record, request.arch, kernels, place)
    path = staging / library_name(record)
    report = {"kernels": kernels, "library_bytes": path.stat().st_size, "needed": library.needed, "seconds": seconds}
    dependencies = _dependencies(staging)
    provenance = {
        "schema": SCHEMA,
        "source_key": request.source_key,
        "build_key": request.build_key,
        "record": record.description(),
        "arch": request.arch.name,
        "rendering": request.rendering,
        "flags": request.flags,
        "extra_flags": request.extra_flags,
        "toolchain": request.toolchain.identity,
        "library": {"name": path.name, "size": path.stat().st_size, "sha256": file_digest(path)},
        "num_dependencies": len(dependencies),
        "built": {"time": time.time(), "host": platform.node(), "seconds": seconds},
    }
    _write(staging / REPORT, report)
    _write(staging / DEPENDENCIES, {"files": dependencies})
    _write(staging / PROVENANCE, provenance)


def _write(path: Path, value: dict[str, Any]) -> None:
    # One line for the manifest: hundreds of headers are read on every hit.
    indent = None if path.name == DEPENDENCIES else 1
    path.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")


def _dependencies(staging: Path) -> list[list[Any]]:
    """Return [path, stat, sha256] of every header in the depfile; the source itself is in the key."""
    depfile = staging / DEPFILE
    if not depfile.is_file():
        return []
    text = depfile.read_text(encoding="utf-8", errors="surrogateescape").replace("\\\n", " ")
    names = re.split(r"(?<!\\)\s+", text.partition(": ")[2].strip())
    headers = {_unescaped(name) for name in names if name}
    depfile.unlink()
    return [[name, stat_of(name), file_digest(name)] for name in sorted(headers) if os.path.isabs(name)]


def _unescaped(name: str) -> str:
    return re.sub(r"\\([ #:\\])", r"\1", name).replace("$$", "$")


def publish(root: Path, request: Request, staging: Path) -> Artifact:
    """Rename the staging directory to its entry and return the artifact.

    When another process was faster its entry is used if it verifies, else replaced; when neither works, our own result
    is used where it lies.
    """
    for name in (library_name(request.record), DEPENDENCIES, PROVENANCE):
        _make_durable(staging / name)
    _make_durable(staging)
    final = cache.entry_directory(root, request.record, request.arch.name, request.build_key)
    for _ in range(2):
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            os.rename(staging, final)
        except OSError:
            winner = _winner(root, request, final)
            if winner is not None:
                return winner
        else:
            _make_durable(final.parent)
            return _opened(request, final, "built", "compiled now")
    return _opened(request, staging, "built", f"compiled now; {final} could not be replaced")


def _winner(root: Path, request: Request, final: Path) -> Artifact | None:
    try:
        return _opened(request, final, "cache", "another process compiled it at the same time")
    except FileNotFoundError:
        return None
    except cache.EntryFault as fault:
        cache.quarantine(root, final, fault)
        return None


def _opened(request: Request, directory: Path, origin: str, reason: str) -> Artifact:
    return cache.open_entry(
        directory, request.record, request.arch.name, origin=origin, reason=reason, dependencies=False
    )


def _make_durable(path: Path) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
