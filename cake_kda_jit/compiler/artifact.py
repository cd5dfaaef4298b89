"""A compiled library and the names of the files beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..record import Record

PROVENANCE = "provenance.json"
DEPENDENCIES = "dependencies.json"
REPORT = "report.json"
LOG = "build.log"
COMMAND = "command.sh"
NINJA_FILE = "build.ninja"


def library_name(record: Record) -> str:
    """Return the file name of a record's library: the symbol, so that a map of the process can be read."""
    return f"{record.symbol}.so"


@dataclass(frozen=True, eq=False)
class Artifact:
    """A library whose size and digest were verified, and where it came from.

    ``origin`` is built, cache or prebuilt; ``reason`` says in words why this one was taken. ``provenance`` is the
    content of the entry's ``provenance.json``.
    """

    record: Record
    arch: str
    library: Path
    directory: Path
    origin: str
    source_key: str
    build_key: str
    provenance: dict[str, Any]
    reason: str = ""

    @property
    def size(self) -> int:
        """Size of the library in bytes, as it was built."""
        return self.provenance["library"]["size"]

    @property
    def sha256(self) -> str:
        """Digest of the library, as it was built."""
        return self.provenance["library"]["sha256"]
