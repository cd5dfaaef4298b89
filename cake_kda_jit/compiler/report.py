"""Resources of compiled kernels, read from the reports beside the libraries; two directories can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .artifact import PROVENANCE, REPORT
from .diagnose import short_name
from .roots import VERSION_DIR

NUMBERS = ("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "shared_bytes", "constant_bytes")
"""What is told of each kernel; spills and memory in bytes."""


@dataclass(frozen=True)
class Row:
    """One kernel function of one library, or a library of the cpu family, which has none.

    ``numbers`` has registers, spilled, stack, shared and constant bytes of the function, and ``library_bytes``.
    ``seconds`` is the time of the whole library's compilation, None where it was left out.
    """

    program: str
    variant: str
    arch: str
    function: str
    numbers: dict[str, int]
    seconds: float | None
    toolchain: str

    @property
    def name(self) -> tuple[str, str, str, str]:
        """What is the same in two directories."""
        return (self.program, self.variant, self.arch, self.function)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {
            "program": self.program,
            "variant": self.variant,
            "arch": self.arch,
            "function": self.function,
            **self.numbers,
            "seconds": self.seconds,
            "toolchain": self.toolchain,
        }


def read_reports(directory: Path) -> list[Row]:
    """Return the rows of every entry of a cache or prebuilt directory; the newest of two builds of one kernel.

    Raises ConfigError if the directory has no entries' structure.
    """
    if not (directory / VERSION_DIR).is_dir():
        raise ConfigError(f"{directory} is no cache and no prebuilt directory: it has no {VERSION_DIR}/")
    found: dict[tuple[str, ...], Row] = {}
    entries = [path.parent for path in (directory / VERSION_DIR).glob(f"[!.]*/*/{PROVENANCE}")]
    for entry in sorted(entries, key=lambda path: path.stat().st_mtime_ns):
        for row in _rows(entry):
            found[row.name] = row
    return [found[name] for name in sorted(found)]


def _rows(entry: Path) -> Iterator[Row]:
    try:
        report = json.loads((entry / REPORT).read_bytes())
        provenance = json.loads((entry / PROVENANCE).read_bytes())
        record, arch = provenance["record"], provenance["arch"]
        tool = provenance["toolchain"]["cuda"] or provenance["toolchain"]["host"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # `cache verify` is who tells of damage
    for kernel in report["kernels"] or [{"function": ""}]:
        numbers = {name: kernel[name] for name in NUMBERS if name in kernel}
        numbers["library_bytes"] = report["library_bytes"]
        yield Row(
            record["program"],
            record["variant"],
            arch,
            short_name(kernel["function"]),
            numbers,
            report.get("seconds"),
            tool["version"],
        )


@dataclass(frozen=True)
class Change:
    """A kernel that differs between two directories: None where one does not have it."""

    name: tuple[str, str, str, str]
    before: dict[str, int] | None
    after: dict[str, int] | None

    def changed(self) -> dict[str, tuple[int | None, int | None]]:
        """Return the numbers that differ, as (before, after)."""
        before, after = self.before or {}, self.after or {}
        names = [name for name in (*NUMBERS, "library_bytes") if before.get(name) != after.get(name)]
        return {name: (before.get(name), after.get(name)) for name in names}


def compare(before: list[Row], after: list[Row]) -> list[Change]:
    """Return the kernels whose numbers differ between two directories, or that only one has."""
    first = {row.name: row.numbers for row in before}
    second = {row.name: row.numbers for row in after}
    changes = [Change(name, first.get(name), second.get(name)) for name in sorted(first.keys() | second.keys())]
    return [change for change in changes if change.before != change.after]
