"""Everything that one build needs, decided before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arch import Arch
from ..codegen.render import RenderedSource
from ..record import Record
from .toolchain import Toolchain


@dataclass(frozen=True)
class Request:
    """One build: source and what it was rendered from, compilers, tokenised flags and the keys they form."""

    record: Record
    arch: Arch
    source: RenderedSource
    rendering: dict[str, Any]
    toolchain: Toolchain
    flags: tuple[str, ...]
    extra_flags: tuple[str, ...]
    source_key: str
    build_key: str
