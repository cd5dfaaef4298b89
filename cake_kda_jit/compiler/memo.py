"""Small facts remembered between processes, so that a hit renders nothing and starts nothing.

Two kinds, both in the user cache: which source digest a record renders to (checked against the content of every
template read), and what a compiler is (checked against the stat of its binaries). A memo that cannot be read or written
is no memo: it is never an error, and it is never written while compiling is disabled.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import config
from ..record import Record
from .key import digest
from .rendering import is_current, render_for_build
from .roots import VERSION_DIR, find_writable_root, user_roots

TOOL_SCHEMA = 2
"""Version of what is remembered of a compiler; raised when the facts change."""


def stat_of(path: str | os.PathLike) -> list[int]:
    """Return what tells that a file is unchanged. The change time catches an edit that restores the mtime."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def source_digest(record: Record, arch: str) -> str:
    """Return the digest of the record's rendered source, from the memo where it is current, else by rendering."""
    name = f"render-{digest([record.description(), arch])[:32]}"
    known = _read(name)
    if known is not None and is_current(known):
        return known["source_digest"]
    source, inputs = render_for_build(record, arch)
    _write(name, inputs)
    return source.digest


def tool_name(kind: str, path: str) -> str:
    """Return the memo name of the compiler at a path. The resolved path counts: a switched link is another compiler."""
    return f"{kind}-{digest([TOOL_SCHEMA, path, os.path.realpath(path)])[:32]}"


def read_tool(name: str) -> dict[str, Any] | None:
    """Return what is remembered of a compiler, if none of its files has changed."""
    known = _read(name)
    if known is None:
        return None
    try:
        return known if all(stat_of(path) == status for path, status in known["files"].items()) else None
    except OSError:
        return None


def write_tool(name: str, files: Sequence[str], content: dict[str, Any]) -> None:
    """Remember a compiler together with the stat of the files that make it."""
    _write(name, {**content, "files": {path: stat_of(path) for path in files}})


def _read(name: str) -> dict[str, Any] | None:
    for root in user_roots():
        try:
            return json.loads((root / VERSION_DIR / ".memo" / f"{name}.json").read_bytes())
        except (OSError, ValueError):
            continue
    return None


def _write(name: str, content: dict[str, Any]) -> None:
    if config.read("DISABLE"):
        return
    root = find_writable_root()
    if root is not None:
        with contextlib.suppress(OSError):
            write_atomically(root / VERSION_DIR / ".memo" / f"{name}.json", json.dumps(content))


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old text or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
