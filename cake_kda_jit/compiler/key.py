"""Keys: canonical JSON and sha256. A key holds everything that changes a library, and nothing else.

The *source key* can be formed on a machine without a compiler; prebuilt and read-only caches match by it. The
*build key* adds the compilers and the flags; the user cache matches by it. Absolute paths, the working directory, the
user, the time, the versions of Python, torch and this package, the verbosity and the number of jobs are in neither.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from ..record import Record

SCHEMA = 1
"""Version of the keys and of the cache's layout; raised when either changes its meaning."""

KEY_LENGTH = 12
"""Hex digits of a key in a directory name; the whole key stands in the entry's provenance."""


def canonical_json(value: object) -> str:
    """Return JSON with sorted names and no spaces: equal values give equal text in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: object) -> str:
    """Return the sha256 of a value's canonical JSON, in hex."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def file_digest(path: str | Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    result = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            result.update(block)
    return result.hexdigest()


def source_key(record: Record, arch: str, source_digest: str) -> str:
    """Return the key of what is compiled: record, argument layout, target and the rendered text's digest."""
    return digest({"schema": SCHEMA, "record": record.description(), "arch": arch, "source": source_digest})


def build_key(source: str, flags: Sequence[str], toolchain: dict[str, object], extra_flags: Sequence[str]) -> str:
    """Return the key of how it is compiled. ``flags`` hold tokens for paths; ``toolchain`` is Toolchain.identity."""
    return digest(
        {
            "schema": SCHEMA,
            "source_key": source,
            "flags": list(flags),
            "toolchain": toolchain,
            "extra_flags": list(extra_flags),
        }
    )
