"""The frozen index of all records. It is built from ``programs.PROGRAM_NAMES``; nothing registers itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module

from .programs import PROGRAM_NAMES
from .record import Program, Record


@dataclass(frozen=True)
class Registry:
    """All programs and their records, sorted by program, family and variant."""

    programs: tuple[Program, ...]

    def records(self) -> tuple[Record, ...]:
        """Return every record, shipped and test-only."""
        found = (record for program in self.programs for record in program.records)
        return tuple(sorted(found, key=lambda r: (r.program, r.family, r.variant)))

    def shipped(self) -> tuple[Record, ...]:
        """Return the records of ``build.json``."""
        return tuple(record for record in self.records() if record.shipped)

    def test_only(self) -> tuple[Record, ...]:
        """Return the records of ``build.test.json``."""
        return tuple(record for record in self.records() if not record.shipped)

    def get(self, program: str, variant: str, family: str) -> Record:
        """Return one record; raises KeyError with the records that the program has."""
        for record in self.records():
            if (record.program, record.variant, record.family) == (program, variant, family):
                return record
        near = [r.name for r in self.records() if r.program == program] or [p.name for p in self.programs]
        raise KeyError(f"no record {family}/{program}__{variant}; there are: {', '.join(near)}")


@cache
def registry() -> Registry:
    """Return the frozen registry of all kernel records."""
    modules = (import_module(f"{__package__}.programs.{name}") for name in PROGRAM_NAMES)
    return Registry(tuple(module.PROGRAM for module in modules))
