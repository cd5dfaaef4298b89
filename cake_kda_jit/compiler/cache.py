"""Entries of a cache: reading, verifying and finding them. Nothing here compiles.

    <root>/v1/<arch>/<program>__<variant>.<key12>/    one entry: immutable, renamed in once
    <root>/v1/.quarantine/                            entries that failed verification

A library is verified by size and digest before anybody opens it: opening a truncated one kills the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import LoadError
from ..record import Record
from .artifact import DEPENDENCIES, PROVENANCE, Artifact
from .key import KEY_LENGTH, SCHEMA, file_digest
from .memo import stat_of
from .roots import VERSION_DIR
from .usage import hold


class EntryFault(Exception):
    """Why an entry cannot be used: an event that heals by rebuilding, not an error of the user."""


class StaleEntry(EntryFault):
    """An entry that is whole but whose headers have changed since."""


def entry_name(record: Record, build_key: str) -> str:
    """Return the directory name of an entry: readable, then the first digits of the key."""
    return f"{record.symbol}.{build_key[:KEY_LENGTH]}"


def entry_directory(root: Path, record: Record, arch: str, build_key: str) -> Path:
    """Return where the entry of a build key stands under a cache's root."""
    return root / VERSION_DIR / arch / entry_name(record, build_key)


def read_provenance(directory: Path) -> dict[str, Any]:
    """Return an entry's provenance; raises FileNotFoundError without an entry, EntryFault if it is damaged."""
    try:
        provenance = json.loads((directory / PROVENANCE).read_bytes())
        complete = provenance["schema"] == SCHEMA and {"source_key", "build_key", "library"} <= provenance.keys()
    except (FileNotFoundError, NotADirectoryError):
        if directory.is_dir():
            raise EntryFault("provenance is missing") from None
        raise FileNotFoundError(f"no entry {directory}") from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise EntryFault(f"provenance cannot be read ({error})") from None
    if not complete:
        raise EntryFault("provenance is incomplete")
    return provenance


def check_library(path: Path, size: int, sha256: str) -> None:
    """Raise EntryFault unless the file has the size and the digest that were recorded when it was built."""
    try:
        actual = path.stat().st_size
        if actual != size:
            raise EntryFault(f"library has {actual} bytes, recorded {size}")
        if file_digest(path) != sha256:
            raise EntryFault("library's digest differs from the recorded one")
    except OSError as error:
        raise EntryFault(f"library cannot be read ({error})") from None


def check_dependencies(directory: Path, provenance: dict[str, Any]) -> None:
    """Raise EntryFault if a header that the entry was compiled from has another content now."""
    path = directory / DEPENDENCIES
    try:
        text = path.read_bytes()
        files = json.loads(text)["files"]
    except (OSError, ValueError, KeyError) as error:
        raise EntryFault(f"dependency manifest cannot be read ({error})") from None
    if len(files) != provenance["num_dependencies"]:
        raise EntryFault("dependency manifest is incomplete")
    for name, status, sha256 in files:
        try:
            changed = stat_of(name) != status and file_digest(name) != sha256
        except OSError as error:
            raise StaleEntry(f"dependency {name} cannot be read ({error.strerror})") from None
        if changed:
            raise StaleEntry(f"dependency {name} has changed")


def open_entry(directory: Path, record: Record, arch: str, *, origin: str, reason: str, dependencies: bool) -> Artifact:
    """Return an entry's verified artifact; raises FileNotFoundError without an entry, EntryFault for a bad one."""
    provenance = read_provenance(directory)
    if dependencies:
        check_dependencies(directory, provenance)
    library = directory / provenance["library"]["name"]
    keys = provenance["source_key"], provenance["build_key"]
    artifact = Artifact(record, arch, library, directory, origin, *keys, provenance, reason)
    try:
        hold(artifact)  # before it is verified, so that it cannot be removed between this and its loading
    except FileNotFoundError:
        if directory.is_dir():
            raise EntryFault("library is missing") from None
        raise
    check_library(library, artifact.size, artifact.sha256)
    return artifact


def candidates(root: Path, record: Record, arch: str) -> Iterator[Path]:
    """Yield the directories of a record's entries under a root, newest first."""
    parent = root / VERSION_DIR / arch
    prefix = record.symbol + "."
    found = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.startswith(prefix):
                    found.append((entry.stat().st_mtime_ns, entry.name))
    for _, name in sorted(found, reverse=True):
        yield parent / name


def quarantine(root: Path, directory: Path, fault: EntryFault) -> None:
    """Move a bad entry out of the way and say why. Only whoever holds the entry's build lock may.

    Without the lock, one process would move away what another has just built in its place.
    """
    moved = move_to_quarantine(root, directory, fault)
    # A changed header is the ordinary life of a toolchain; damage is worth a word.
    if not isinstance(fault, StaleEntry):
        warnings.warn(f"kernel cache entry {directory} is unusable: {fault}; {moved}", RuntimeWarning, stacklevel=2)


def move_to_quarantine(root: Path, directory: Path, fault: EntryFault) -> str:
    """Move an entry to quarantine with the reason beside it; returns what was done."""
    place = root / VERSION_DIR / ".quarantine"
    target = place / f"{directory.name}.{time.time_ns()}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        os.rename(directory, target)
        (target / "reason.txt").write_text(f"{fault}\n", encoding="utf-8")
    except OSError as error:
        return f"it cannot be moved away ({error.strerror})"
    return f"moved to {target}"


def verify_artifact(artifact: Artifact) -> None:
    """Raise LoadError unless an artifact's library is still the one that was built: to be asked before opening it.

    Size and digest are compared. The next build finds the entry bad, moves it to quarantine and makes it again.
    """
    try:
        check_library(artifact.library, artifact.size, artifact.sha256)
    except EntryFault as fault:
        raise LoadError(f"{artifact.library} is damaged: {fault}; build {artifact.record.name} again") from None
