"""The pack files of the command line: document boundaries as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate

from ..errors import ConfigError
from ..ops.pack import boundaries_from

ACCEPTED = (
    'a JSON file: {"cu_seqlens": [0, 13, 18]} or {"lengths": [13, 5]}, or the list of boundaries alone; with '
    '"cu_seqlens_padded" or "fragments": [[rank, start, end], ...] for the layouts that need them'
)
_KEYS = {"cu_seqlens", "lengths", "cu_seqlens_padded", "fragments"}


@dataclass(frozen=True)
class PackFile:
    """A pack as a file gives it; ``cu_seqlens`` is checked, what only some layouts need is None where it is absent."""

    cu_seqlens: tuple[int, ...]
    cu_seqlens_padded: list[int] | None = None
    fragments: list[list[int]] | None = None


def read_pack(path: str) -> PackFile:
    """Read a pack file; raises ConfigError for what is no such file, UnsupportedProblemError for boundaries of none."""
    with open(path, encoding="utf-8") as file:
        try:
            content = json.load(file)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is no JSON ({error}); give {ACCEPTED}") from None
    if isinstance(content, list):
        content = {"cu_seqlens": content}
    if not isinstance(content, dict) or len({"cu_seqlens", "lengths"} & content.keys()) != 1 or content.keys() - _KEYS:
        given = f"has {', '.join(sorted(content)) or 'nothing'}" if isinstance(content, dict) else "is no object"
        raise ConfigError(f"{path} {given}; give {ACCEPTED}")
    if "lengths" in content:
        content["cu_seqlens"] = _boundaries(content.pop("lengths"), path)
    if not isinstance(content.get("fragments", []), list):
        raise ConfigError(f"{path}: fragments is no list; give {ACCEPTED}")
    content["cu_seqlens"] = boundaries_from(content["cu_seqlens"])
    return PackFile(**content)


def _boundaries(lengths: object, path: str) -> list[int]:
    if not isinstance(lengths, list) or not all(type(length) is int and length >= 0 for length in lengths):
        raise ConfigError(f"{path}: lengths must be a list of numbers of tokens; give {ACCEPTED}")
    return list(accumulate(lengths, initial=0))
