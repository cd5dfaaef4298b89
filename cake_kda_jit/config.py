"""The one home of environment variables and knobs.

Order, for every knob: the argument of the call, the environment variable, the default. An empty variable counts as
unset. Nothing is cached: a test or a notebook may change a variable between two calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError

PREFIX = "CAKE_KDA_JIT_"


@dataclass(frozen=True)
class Knob:
    """One environment variable: its full name, how it is read, its default and what it does."""

    name: str
    parse: Callable[[str], Any]
    accepts: str
    default: Any
    doc: str


def _boolean(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError
    return text == "1"


def _positive_integer(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _positive_seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _path_list(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(os.pathsep) if part)


def _chunk_multiple(text: str) -> int:
    value = int(text)
    if value < 64 or value % 64:
        raise ValueError
    return value


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return parse


TRANSFER_WALKS = ("bf16x3_hw64", "bf16x3", "tf32_hilo")
"""The walks a user may name; index 0 is the shipped default."""

BACKWARDS = ("saved", "replay")
FAMILY_CHOICES = ("cpu", "smxx", "sm90")


def _own(name: str, parse: Callable[[str], Any], accepts: str, default: Any, doc: str) -> Knob:
    return Knob(PREFIX + name, parse, accepts, default, doc)


KNOBS: tuple[Knob, ...] = (
    _own("CACHE_DIR", str, "a directory", None, "user cache of compiled kernels; an error if it cannot be written"),
    _own("CACHE_RO", _path_list, "directories, separated as in PATH", (), "read-only shared caches, looked at last"),
    _own("PREBUILT", _path_list, "directories, separated as in PATH", (), "prebuilt directories, looked at first"),
    _own("DISABLE", _boolean, "0 or 1", False, "1: never compile; a kernel that is not found is an error"),
    _own("CACHE_MAX_BYTES", _positive_integer, "a positive integer", 8 << 30, "size cap of the user cache"),
    _own("LOCK_TIMEOUT", _positive_seconds, "seconds", 600.0, "wait for another builder since its last heartbeat"),
    _own("COMPILE_TIMEOUT", _positive_seconds, "seconds", 900.0, "longest time one compilation may take"),
    _own("JOBS", _positive_integer, "a positive integer", None, "compilations at a time; default by cores and memory"),
    _own("NVCC", str, "a path", None, "the nvcc to use; default CUDA_HOME, PATH, the usual places"),
    _own("CXX", str, "a path or a command of one word", None, "the host compiler; default g++, then c++ and clang++"),
    _own("NINJA", str, "a path", None, "the ninja to use; default its Python package, then PATH"),
    _own("TOOLCHAIN_DIR", str, "a directory", None, "where `toolchain install` puts and finds pip toolchains"),
    _own("EXTRA_FLAGS", str, "compiler flags", "", "appended to every compile command, and part of the key"),
    _own("VERBOSE", _boolean, "0 or 1", False, "1: print every compile command and where each kernel came from"),
    _own("FAMILY", _one_of(*FAMILY_CHOICES), "cpu, smxx or sm90", None, "force a kernel family, or refuse the call"),
    _own("TRANSFER_WALK", _one_of(*TRANSFER_WALKS), ", ".join(TRANSFER_WALKS), TRANSFER_WALKS[0], "the transfer walk"),
    _own("BACKWARD", _one_of(*BACKWARDS), "saved or replay", "saved", "what a forward keeps for its backward"),
    _own("CHECKPOINT_TOKENS", _chunk_multiple, "a multiple of 64", 512, "tokens between two kept states in replay"),
    Knob("CUDA_HOME", str, "a directory", None, "a CUDA toolkit"),
    Knob("XDG_CACHE_HOME", str, "a directory", None, "parent of the default cache directory"),
    Knob("TMPDIR", str, "a directory", "/tmp", "parent of the fall-back cache directory"),
    Knob("MAX_JOBS", _positive_integer, "a positive integer", None, "compilations at a time, if JOBS is unset"),
    Knob("RANK", int, "an integer", None, "this process's rank, set by torchrun"),
    Knob("LOCAL_RANK", int, "an integer", None, "this process's rank on its host, set by torchrun"),
    Knob("WORLD_SIZE", _positive_integer, "a positive integer", None, "number of ranks, set by torchrun"),
)

_BY_NAME = {knob.name: knob for knob in KNOBS} | {knob.name.removeprefix(PREFIX): knob for knob in KNOBS}


def knob(name: str) -> Knob:
    """Return the knob called ``name``, with or without the ``CAKE_KDA_JIT_`` prefix."""
    return _BY_NAME[name]


def read(name: str) -> Any:
    """Return a knob's value from the environment, or its default; raises ConfigError on a malformed value."""
    found = knob(name)
    text = os.environ.get(found.name, "")
    if not text:
        return found.default
    try:
        return found.parse(text)
    except ValueError:
        raise ConfigError(
            f"{found.name}={text!r} is not valid; accepted: {found.accepts}; unset it for "
            f"the default ({found.default!r})"
        ) from None


def raw_reader(*names: str) -> Callable[[], tuple[object, ...]]:
    """Return what reads knobs as the environment holds them: equal only while nothing has changed.

    For every call: it takes a tenth of the time of ``os.environ.get``, which raises and catches two errors inside for a
    variable that is not set.
    """
    encoded = [_RAW_NAMES[name] for name in names]
    return lambda: tuple(map(_ENVIRONMENT.get, encoded))


_ENVIRONMENT: Mapping[object, object] = os.environ._data
_RAW_NAMES = {name: os.environ.encodekey(found.name) for name, found in _BY_NAME.items()}


def is_set(name: str) -> bool:
    """Whether the environment names a value for the knob."""
    return bool(os.environ.get(knob(name).name, ""))


def resolve(name: str, argument: Any) -> Any:
    """Return the argument if it is not None, else the environment's value, else the default."""
    return read(name) if argument is None else argument


def environment(*, without: tuple[str, ...] = (), **changes: str) -> dict[str, str]:
    """Return a copy of the process environment for a child process, with names removed and values changed."""
    kept = {key: value for key, value in os.environ.items() if key not in without}
    return {**kept, **changes}


def set_default(name: str, value: str) -> None:
    """Set a variable that another library reads, unless the user has set it."""
    os.environ.setdefault(name, value)


def foreign(names: tuple[str, ...]) -> Mapping[str, str]:
    """Return those of ``names`` that the environment sets: for warnings about variables we scrub."""
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def table() -> str:
    """Return the Markdown table of all knobs, as it stands in the documentation."""
    rows = ["| variable | accepts | default | what it does |", "|---|---|---|---|"]
    rows += [f"| `{k.name}` | {k.accepts} | {_shown(k.default)} | {k.doc} |" for k in KNOBS]
    return "\n".join(rows) + "\n"


def _shown(default: Any) -> str:
    if default in (None, (), ""):
        return "unset"
    return f"`{int(default) if isinstance(default, bool) else default}`"
