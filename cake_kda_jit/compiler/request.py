"""Everything that one build needs, decided before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from ..arch import Arch
from ..codegen.render import RenderedSource
from ..record import Record
from .toolchain import Toolchain


@dataclass(frozen=True)
class Request:
    """One build: source, compilers, tokenised flags and the keys they form."""

    record: Record
    arch: Arch
    source: RenderedSource
    toolchain: Toolchain
    flags: tuple[str, ...]
    extra_flags: tuple[str, ...]
    source_key: str
    build_key: str
