"""Descriptions of kernels: argument layouts, records and programs. Pure data; nothing here renders or compiles.

A *program* is one operation (``chunk_scan``); a *record* is one way to build it (``chunk_scan`` for bf16 and
K = V = 128 in the ``cpu`` family). A record's ``params`` become constants of its template; its ``build_keywords`` go to
the compiler.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

ABI_VERSION = 2
"""Version of the calling convention of libraries; raised when the exported functions or their meaning change."""

ParamValue = str | int | float | bool

_SCALAR_KINDS = {
    "ptr": ("q", 8, "void*"),
    "i64": ("q", 8, "int64_t"),
    "f64": ("d", 8, "double"),
    "i32": ("i", 4, "int32_t"),
    "f32": ("f", 4, "float"),
}
_ARRAY = re.compile(r"(strides|ptr|i64|i32)\((\d+)\)")


@dataclass(frozen=True)
class Field:
    """One member of an argument block: ``kind`` is ptr, i64, i32, f32, f64, or an array of n of them.

    Arrays are ``strides(n)`` (n int64), ``ptr(n)``, ``i64(n)`` and ``i32(n)``.

    ``doc`` says shape, dtype and unit, and stands as a comment in the rendered source.
    """

    name: str
    kind: str
    doc: str = ""

    @property
    def count(self) -> int:
        """Number of scalars: n for an array of n, else 1."""
        match = _ARRAY.fullmatch(self.kind)
        return int(match.group(2)) if match else 1

    @property
    def is_array(self) -> bool:
        """Whether the value is a sequence of ``count`` integers; a null pointer in one is 0."""
        return _ARRAY.fullmatch(self.kind) is not None

    @property
    def is_pointer(self) -> bool:
        """Whether it is a pointer, or an array of them."""
        return self.kind == "ptr" or self.kind.startswith("ptr(")

    @property
    def scalar(self) -> tuple[str, int, str]:
        """The ``struct`` code, the size in bytes and the C++ type of one scalar."""
        match = _ARRAY.fullmatch(self.kind)
        kind = match.group(1) if match else self.kind
        return _SCALAR_KINDS["i64" if kind == "strides" else kind]

    @property
    def declaration(self) -> str:
        """The C++ member declaration, without its semicolon."""
        suffix = f"[{self.count}]" if self.is_array else ""
        return f"{self.scalar[2]} {self.name}{suffix}"


@dataclass(frozen=True)
class Entry:
    """The argument block of a program's entry function: fields in decreasing size, so that nothing is padded.

    Its ``num_pointers`` pointers stand first: they are all that changes between two calls on tensors of equal layout.
    The block's end is rounded up to 8 bytes. Both sides of the call are generated from this one description.
    """

    fields: tuple[Field, ...]
    num_pointers: int = field(init=False, repr=False, compare=False)
    _packer: struct.Struct = field(init=False, repr=False, compare=False)
    _names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _arrays: tuple[int, ...] = field(init=False, repr=False, compare=False)  # their positions, from the last on

    def __post_init__(self) -> None:
        sizes = [f.scalar[1] for f in self.fields]
        if sizes != sorted(sizes, reverse=True):
            raise ValueError(f"fields must stand in decreasing size; got {[f.name for f in self.fields]}")
        if len({f.name for f in self.fields}) != len(self.fields):
            raise ValueError("two fields have one name")
        kinds = [f.is_pointer for f in self.fields]
        if kinds != sorted(kinds, reverse=True):
            raise ValueError(f"pointers must stand before all other fields; got {[f.name for f in self.fields]}")
        object.__setattr__(self, "num_pointers", sum(f.count for f in self.fields if f.is_pointer))
        codes = "".join(f.scalar[0] * f.count for f in self.fields)
        padding = -struct.calcsize("=" + codes) % 8
        object.__setattr__(self, "_packer", struct.Struct("=" + codes + "x" * padding))
        object.__setattr__(self, "_names", tuple(f.name for f in self.fields))
        arrays = (position for position, f in enumerate(self.fields) if f.is_array)
        object.__setattr__(self, "_arrays", tuple(sorted(arrays, reverse=True)))

    @property
    def size(self) -> int:
        """Size of the block in bytes, a multiple of 8."""
        return self._packer.size

    def offsets(self) -> list[tuple[Field, int]]:
        """Return each field with its offset in bytes."""
        result, offset = [], 0
        for f in self.fields:
            result.append((f, offset))
            offset += f.scalar[1] * f.count
        return result

    def pack(self, values: Mapping[str, object]) -> bytes:
        """Return the argument block; a missing or an unknown name raises TypeError, None is a null pointer."""
        # Every launch comes through here: what does not depend on the values was done in __post_init__.
        try:
            flat = [0 if (value := values[name]) is None else value for name in self._names]
        except KeyError as missing:
            raise TypeError(f"argument {missing} is missing") from None
        if len(values) != len(flat):
            raise TypeError(f"unknown arguments {sorted(set(values) - set(self._names))}")
        for position in self._arrays:
            flat[position : position + 1] = flat[position]
        return self._packer.pack(*flat)

    @property
    def abi(self) -> int:
        """A 64-bit digest of the layout and of ``ABI_VERSION``; a library exports the same number."""
        layout = [ABI_VERSION, [[f.name, f.kind] for f in self.fields]]
        digest = hashlib.sha256(json.dumps(layout, separators=(",", ":")).encode()).digest()
        return int.from_bytes(digest[:8], "little")


@dataclass(frozen=True)
class BuildKeywords:
    """What the compiler is told beside the target. ``defines`` are (name, value) pairs."""

    opt_level: int = 3
    lineinfo: bool = False
    max_registers: int | None = None
    fast_math: bool = False
    defines: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Limits:
    """What a build may use; past it the build fails. ``max_spill_bytes`` None means reported, not limited."""

    max_spill_bytes: int | None = 0
    max_registers: int | None = None
    shared_memory_bytes: int = 0


def make_params(**values: ParamValue) -> tuple[tuple[str, ParamValue], ...]:
    """Return template constants as a hashable, sorted tuple of (name, value) pairs."""
    return tuple(sorted(values.items()))


@dataclass(frozen=True)
class Record:
    """One buildable kernel.

    *Shipped* records stand in ``build.json`` and may be selected; *test-only* ones stand in ``build.test.json`` and are
    used only when an argument or the environment names them. ``archs`` are the targets it builds for; ``template`` is
    relative to ``templates/``.
    """

    program: str
    variant: str
    family: str
    params: tuple[tuple[str, ParamValue], ...]
    archs: tuple[str, ...]
    template: str
    entry: Entry
    shipped: bool = True
    build_keywords: BuildKeywords = BuildKeywords()
    limits: Limits = Limits()

    @property
    def symbol(self) -> str:
        """The exported function's name: what a profiler shows."""
        return f"{self.program}__{self.variant}"

    @property
    def name(self) -> str:
        """``family/program__variant``: unique in the catalog."""
        return f"{self.family}/{self.symbol}"

    @property
    def suffix(self) -> str:
        """``.cpp`` or ``.cu``."""
        return ".cpp" if self.family == "cpu" else ".cu"

    @property
    def constants(self) -> dict[str, ParamValue]:
        """``params`` as a dictionary."""
        return dict(self.params)

    def description(self) -> dict[str, object]:
        """Return what identifies the record, as plain JSON values: a part of every key."""
        return {
            "program": self.program,
            "variant": self.variant,
            "family": self.family,
            "params": self.constants,
            "build_keywords": asdict(self.build_keywords),
            "template": self.template,
            "abi": f"{self.entry.abi:016x}",
        }


@dataclass(frozen=True)
class Program:
    """One operation and all its records. ``summary`` is one line; ``bytes_note`` states its memory traffic."""

    name: str
    summary: str
    records: tuple[Record, ...]
    bytes_note: str = ""


CPU_ONLY_FIELDS = (Field("num_threads", "i32", "worker threads of this launch; bits do not depend on it"),)


def cpu_entry(fields: tuple[Field, ...]) -> Entry:
    """Return the entry of a program's cpu family: the shared fields and the thread count."""
    return Entry(fields + CPU_ONLY_FIELDS)
