"""What ranks must agree on, as named values, and how a disagreement is told. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MOST_ENTRIES = 12
ERROR = "error"
"""The field of a rank that has nothing else to give: why it failed."""


def shown(value: object, digest: str | None = None) -> str:
    """Return a value as text, equal for equal values only; a long tuple as its number of entries and its digest."""
    if digest is None or not isinstance(value, tuple) or len(value) <= MOST_ENTRIES:
        return repr(value)
    return f"{len(value)} entries with digest {digest}"


def find_disagreement(given: Sequence[Mapping[str, str]]) -> str | None:
    """Return a sentence about the first field and rank that differ from rank 0, None if all agree.

    ``given`` has each rank's fields; every rank that sees them gets the same sentence.
    """
    for rank, fields in enumerate(given):
        if ERROR in fields and any(ERROR not in others for others in given):
            return f"rank {rank} failed: {fields[ERROR]}"
    for name in given[0]:
        for rank, fields in enumerate(given):
            if fields.get(name) != given[0][name]:
                return f"rank {rank} has {name} = {fields.get(name)}, rank 0 has {name} = {given[0][name]}"
    return None
