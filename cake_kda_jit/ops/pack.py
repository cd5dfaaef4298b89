"""A pack of documents as plain integers: its boundaries, and fragments of its documents. No torch."""

from __future__ import annotations

import operator
from typing import NamedTuple

from ..errors import UnsupportedProblemError

MAX_TOKENS = 2**31 - 1


class Fragment(NamedTuple):
    """Consecutive tokens of one document on one rank: ``start`` to ``end``, half open, counted along the pack."""

    document: int
    start: int
    end: int
    rank: int

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        return self.end - self.start


def boundaries_from(cu_seqlens: object, name: str = "cu_seqlens") -> tuple[int, ...]:
    """Return checked boundaries ``[N + 1]`` in tokens as integers.

    Takes a list, a tuple, a NumPy array or a torch tensor; one on a GPU costs one synchronising copy. Raises
    UnsupportedProblemError for anything but integers that start at 0 and never decrease.
    """
    values = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens
    if not isinstance(values, (list, tuple)):
        raise UnsupportedProblemError(
            f"{name} is {type(cu_seqlens).__name__}; give the N + 1 boundaries of the documents as a list, a tuple or "
            "a one-dimensional integer tensor"
        )
    boundaries = [_integer(value, f"{name}[{index}]") for index, value in enumerate(values)]
    check_boundaries(boundaries, name=name)
    return tuple(boundaries)


def _integer(value: object, name: str) -> int:
    found = find_integer(value)
    if found is None:
        raise UnsupportedProblemError(f"{name} = {value!r} is {type(value).__name__}; give integers, in tokens")
    return found


def find_integer(value: object) -> int | None:
    """Return an integer of Python, NumPy or torch as one of Python; None for anything else, booleans included."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_boundaries(
    boundaries: list[int], total: int | None = None, name: str = "cu_seqlens", unit: str = "tokens"
) -> None:
    """Raise UnsupportedProblemError unless boundaries start at 0, never decrease and end at ``total`` units."""
    if not boundaries or boundaries[0] != 0:
        given = boundaries[0] if boundaries else "nothing"
        raise UnsupportedProblemError(f"{name} starts with {given}; it must start with 0")
    for index, (start, end) in enumerate(zip(boundaries, boundaries[1:])):
        if end < start:
            raise UnsupportedProblemError(
                f"{name}[{index + 1}] = {end} is below {name}[{index}] = {start}; boundaries must never decrease"
            )
    if total is not None and boundaries[-1] != total:
        raise UnsupportedProblemError(
            f"{name} ends at {boundaries[-1]} but the inputs hold {total} {unit}; the last boundary must equal their "
            "number"
        )
    if boundaries[-1] > MAX_TOKENS:
        raise UnsupportedProblemError(f"a pack of {boundaries[-1]} {unit}; at most {MAX_TOKENS} fit one call")
