"""Read the dynamic symbols of an ELF library without loading it: a damaged library kills the process that loads it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC = struct.Struct("<qQ")

_SHT_DYNAMIC, _SHT_NOBITS, _SHT_DYNSYM = 6, 8, 11
_DT_NEEDED = 1
_EM_X86_64 = 62
_ET_DYN = 3


class NotALibrary(ValueError):
    """The bytes are not a whole 64-bit little-endian ELF shared library."""


@dataclass(frozen=True)
class SharedLibrary:
    """What is read of a library: its machine code's kind, the libraries it needs, and its defined functions' bytes."""

    machine: int
    needed: tuple[str, ...]
    functions: dict[str, bytes]

    def returns_constant(self, function: str, value: int) -> bool:
        """Whether a function's code holds a 64-bit constant.

        On machines other than x86-64, which build such a constant from parts: whether the function exists.
        """
        code = self.functions.get(function)
        if code is None:
            return False
        return self.machine != _EM_X86_64 or value.to_bytes(8, "little") in code


def read_library(path: str | Path) -> SharedLibrary:
    """Parse a shared library; raises NotALibrary with what is wrong, for a truncated one too."""
    data = Path(path).read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise NotALibrary("not a 64-bit little-endian ELF file")
    try:
        kind, machine, _, _, _, table, _, _, _, _, size, count, _ = _HEADER.unpack_from(data)
        sections = [_SECTION.unpack_from(data, table + n * size) for n in range(count)]
    except struct.error:
        raise NotALibrary("ends inside its headers") from None
    if kind != _ET_DYN:
        raise NotALibrary("not a shared library")
    if any(s[4] + s[5] > len(data) for s in sections if s[1] != _SHT_NOBITS):
        raise NotALibrary("ends inside a section")
    functions: dict[str, bytes] = {}
    needed: list[str] = []
    for _, section_kind, _, _, offset, length, link, _, _, _ in sections:
        content = data[offset : offset + length]
        if section_kind == _SHT_DYNSYM:
            names = _strings(data, sections[link])
            for name, info, _, index, value, extent in _SYMBOL.iter_unpack(content):
                if info & 15 == 2 and 0 < index < count:  # a function that this library defines
                    start = sections[index][4] + value - sections[index][3]
                    functions[_text(names, name)] = data[start : start + extent]
        elif section_kind == _SHT_DYNAMIC:
            names = _strings(data, sections[link])
            needed += [_text(names, value) for tag, value in _DYNAMIC.iter_unpack(content) if tag == _DT_NEEDED]
    return SharedLibrary(machine, tuple(needed), functions)


def _strings(data: bytes, section: tuple[int, ...]) -> bytes:
    return data[section[4] : section[4] + section[5]]


def _text(names: bytes, start: int) -> str:
    return names[start : names.index(b"\0", start)].decode(errors="replace")
