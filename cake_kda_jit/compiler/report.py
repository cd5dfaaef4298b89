"""Resources of compiled kernels, read from the reports beside the libraries; two directories can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .artifact import PROVENANCE, REPORT
from .diagnose import short_name
from .disassemble import GROUPS, TOTAL, instruction_mix
from .jobs import available_cores
from .roots import VERSION_DIR

NUMBERS = ("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "shared_bytes", "constant_bytes")
"""What is told of each kernel; spills and memory in bytes."""


@dataclass(frozen=True)
class Row:
    """One kernel function of one library, or a library of the cpu family, which has none.

    Two families can have a variant for one target, so ``family`` is a part of a row's name.
    ``numbers`` has registers, spilled, stack, shared and constant bytes of the function, and ``library_bytes``.
    ``seconds`` is the time of the whole library's compilation, None where it was left out. ``instructions`` are the
    function's instructions by group, empty where nothing was disassembled; ``note`` then says why, and is empty for a
    library without kernels.
    """

    program: str
    variant: str
    family: str
    arch: str
    function: str
    numbers: dict[str, int]
    seconds: float | None
    toolchain: str
    symbol: str
    library: Path
    instructions: dict[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def name(self) -> tuple[str, str, str, str, str]:
        """What is the same in two directories."""
        return (self.program, self.variant, self.family, self.arch, self.function)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {
            "program": self.program,
            "variant": self.variant,
            "family": self.family,
            "arch": self.arch,
            "function": self.function,
            **self.numbers,
            "seconds": self.seconds,
            "toolchain": self.toolchain,
            "instructions": self.instructions or None,
            "note": self.note or None,
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
        library = entry / provenance["library"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # `cache verify` is who tells of damage
    seen: dict[str, int] = {}
    for kernel in report["kernels"] or [{"function": ""}]:
        numbers = {name: kernel[name] for name in NUMBERS if name in kernel}
        numbers["library_bytes"] = report["library_bytes"]
        name = short_name(kernel["function"])
        seen[name] = seen.get(name, 0) + 1
        yield Row(
            record["program"],
            record["variant"],
            record["family"],
            arch,
            name if seen[name] == 1 else f"{name} #{seen[name]}",
            numbers,
            report.get("seconds"),
            tool["version"],
            kernel["function"],
            library,
        )


def add_instructions(rows: list[Row]) -> list[Row]:
    """Return the rows with the instructions of their kernels, as many libraries at a time as there are cores."""
    libraries = sorted({row.library for row in rows if row.symbol})
    with ThreadPoolExecutor(available_cores()) as pool:
        found = dict(zip(libraries, pool.map(instruction_mix, libraries)))
    result = []
    for row in rows:
        mix, reason = found.get(row.library, ({}, ""))
        result.append(replace(row, instructions=mix.get(row.symbol, {}), note=reason))
    return result


@dataclass(frozen=True)
class Change:
    """A kernel whose numbers differ between two directories: field -> (before, after).

    ``before`` and ``after`` are None where a directory does not have the kernel.
    """

    name: tuple[str, str, str, str, str]
    before: Row | None
    after: Row | None
    changed: dict[str, tuple[int | None, int | None]]


def compare(before: list[Row], after: list[Row]) -> list[Change]:
    """Return the kernels whose numbers or instructions differ between two directories, or that only one has.

    Instructions count where both sides were disassembled.
    """
    first, second = {row.name: row for row in before}, {row.name: row for row in after}
    changes = []
    for name in sorted(first.keys() | second.keys()):
        one, other = first.get(name), second.get(name)
        changed = {} if one is None or other is None else dict(_changed(one, other))
        if changed or one is None or other is None:
            changes.append(Change(name, one, other, changed))
    return changes


def _changed(one: Row, other: Row) -> Iterator[tuple[str, tuple[int | None, int | None]]]:
    pairs = [(name, one.numbers.get(name), other.numbers.get(name)) for name in (*NUMBERS, "library_bytes")]
    if one.instructions and other.instructions:
        pairs += [(n, one.instructions.get(n, 0), other.instructions.get(n, 0)) for n in (*GROUPS, TOTAL)]
    yield from ((name, (before, after)) for name, before, after in pairs if before != after)
