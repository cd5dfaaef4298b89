"""Read a compiler's log: which error a failure is, and what registers and memory a kernel uses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..arch import Arch
from ..errors import (
    BuildError,
    CompileError,
    CompilerOutOfMemory,
    CompileTimeout,
    DiskFull,
    HostCompilerUnsupported,
    SpillLimitExceeded,
    ToolchainNotFound,
    UnsupportedArch,
)
from ..record import Record

_ERROR_LINE = re.compile(
    r"error\s*:|\berror\b.*#\d|nvcc fatal|ptxas fatal|undefined (reference|symbol)|multiple definition|cannot find -l"
    r"|cannot find |: not found|died due to signal|Killed|No space left",
)  # fmt: skip
_NOISE = re.compile(r"^(FAILED:|ninja: |\[\d+/\d+\])|collect2: error|ld returned \d+ exit status")
# Lines in which a compiler or linker speaks of the source: its words there say nothing about the compiler itself.
_ABOUT_SOURCE = re.compile(
    r"^\s*\d*\s*\||:\d+(:\d+)?: |\(\d+\): (error|warning)|undefined (reference|symbol)|in function |^\[\d+/\d+\]"
)
_KILLED = re.compile(
    r"Killed signal|signal 9\b|(^|: )\s*(\d+ +)?Killed\b|\[Killed\]|code=137\]|: out of memory\b|memory exhausted"
    r"|what\(\):\s+std::bad_alloc|: Cannot allocate memory|memory allocation failure",
    re.I,
)
# What the first error tells of the machine rather than of the source: (pattern, what to do).
_HINTS = (
    (r"nv/target", "the CUDA headers are incomplete: install nvidia-cuda-cccl of nvcc's release"),
    (r"(cuda\w*|crt/\w+|device_\w+|vector_types)\.h(pp)?: No such file", "nvcc's headers are missing: install the CUDA "
     "runtime's development files of nvcc's release, or run `python -m cake_kda_jit toolchain install`"),
    (r"(cannot find|No such file).*cudart", "the CUDA runtime's libcudart_static.a is missing: install it in nvcc's "
     "release, or run `python -m cake_kda_jit toolchain install`"),
    (r"(cicc|ptxas|cudafe\+\+|libdevice\S*).*(not found|No such file)|cannot find libdevice",
     "parts of nvcc are missing: reinstall it, or run `python -m cake_kda_jit toolchain install`"),
    (r"cc1plus.*(No such file|not found)|cannot execute .cc1plus", "the host compiler has no C++ part: install g++"),
    (r"died due to signal", "a part of nvcc crashed: another release may not; set CAKE_KDA_JIT_NVCC"),
    (r"(fatal error: |cannot open source file )[^ ]*std|bits/c\+\+config\.h", "the C++ standard headers are missing: "
     "install libstdc++'s development files"),
    (r"undefined (reference to|symbol:) .?((typeinfo|vtable|VTT) for )?(std::|operator (new|delete)|__cxa_|__gxx_|"
     r"__cxxabiv1)", "the C++ runtime is not linked: does CAKE_KDA_JIT_CXX name a C compiler (gcc, clang)? Name g++ or "
     "clang++"),
    (r"Permission denied", "a file or directory of the compiler or of the cache cannot be used by this user"),
    (r"CAKE_KDA_JIT_EXTRA_FLAGS|unrecognized (command-line )?option|Unknown option", "does CAKE_KDA_JIT_EXTRA_FLAGS "
     "hold flags of another compiler?"),
)  # fmt: skip

_FULL_BYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where a failed build can be inspected: its log and the line that repeats it."""

    log: str
    reproduction: str


def first_error(log: str) -> str | None:
    """Return the compiler's own first error line, or the last line it printed."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not _NOISE.search(line)]
    for line in lines:
        if _ERROR_LINE.search(line):
            return line
    return lines[-1] if lines else None


def failure(
    record: Record, arch: Arch, status: int | None, log: str, place: Place, *, seconds: float, free_bytes: int
) -> BuildError:
    """Return the typed error of a compiler that did not succeed.

    ``seconds`` was its time limit, ``free_bytes`` are left on the disk that it wrote to.
    """
    what = f"{record.name} for {arch.name}"
    parts = {"log": place.log, "reproduction": place.reproduction, "first_error": first_error(log)}
    if status is None:
        return CompileTimeout(
            f"compiling {what} took longer than {seconds:g} s and was stopped",
            hint="set CAKE_KDA_JIT_COMPILE_TIMEOUT to more seconds",
            **parts,
        )
    if status > 0 and not log.strip() and free_bytes >= _FULL_BYTES:
        # ninja prints each command before it runs it, and each of its own errors.
        return ToolchainNotFound(
            f"compiling {what} failed: ninja ended with status {status} and printed nothing",
            hint="is that a ninja? CAKE_KDA_JIT_NINJA names another, and `pip install ninja` installs one",
            **parts,
        )
    # A disk can be too full for the very message that says so.
    is_silent = not any(_ERROR_LINE.search(line) for line in log.splitlines() if not _NOISE.search(line.strip()))
    if "No space left on device" in log or (is_silent and free_bytes < _FULL_BYTES):
        return DiskFull(
            f"the disk is full: compiling {what} failed",
            hint="free space, or set CAKE_KDA_JIT_CACHE_DIR to another file system",
            **parts,
        )
    if _was_killed(log):
        return CompilerOutOfMemory(
            f"the compiler of {what} was killed, most likely for memory",
            hint="set CAKE_KDA_JIT_JOBS=1, or give this process more memory",
            **parts,
        )
    if "unsupported GNU version" in log or "unsupported clang version" in log:
        return HostCompilerUnsupported(
            f"nvcc refuses the host compiler for {what}",
            hint="set CAKE_KDA_JIT_CXX to a version that the first error names",
            **parts,
        )
    if re.search(r"[Uu]nsupported gpu architecture|not defined for option 'gpu-(architecture|name)'", log):
        return UnsupportedArch(
            f"compiling {what} failed: this nvcc does not know the target",
            hint="set CAKE_KDA_JIT_NVCC to a newer one, or run `python -m cake_kda_jit toolchain install`",
            **parts,
        )
    return CompileError(f"compiling {what} failed", hint=_hint(log), **parts)


def _was_killed(log: str) -> bool:
    return any(_KILLED.search(line) for line in log.splitlines() if not _ABOUT_SOURCE.search(line))


def _hint(log: str) -> str:
    text = first_error(log) or ""
    for pattern, hint in _HINTS:
        if re.search(pattern, text):
            return hint
    return "the log holds all messages; repeat the command to debug it"


_FUNCTION = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_MEMORY = re.compile(r"(\d+) bytes (smem|cmem\[\d+\])")


def resources(log: str) -> list[dict[str, Any]]:
    """Return what ``ptxas -v`` says of each kernel: registers, spills, stack, shared and constant bytes."""
    kernels: list[dict[str, Any]] = []
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            kernels.append({"function": match.group(1), "registers": 0, "stack_bytes": 0, "spill_store_bytes": 0,
                            "spill_load_bytes": 0, "shared_bytes": 0, "constant_bytes": 0})  # fmt: skip
        elif kernels and (match := _SPILLS.search(line)):
            names = ("stack_bytes", "spill_store_bytes", "spill_load_bytes")
            kernels[-1].update(zip(names, map(int, match.groups())))
        elif kernels and (match := _USED.search(line)):
            kernels[-1]["registers"] = int(match.group(1))
            for size, kind in _MEMORY.findall(line):
                kernels[-1]["shared_bytes" if kind == "smem" else "constant_bytes"] += int(size)
    return kernels


_LITERALS = re.compile(r"I((?:L[a-z]n?\d+E)+)E")


def short_name(symbol: str) -> str:
    """Return the last identifier of a mangled C++ name with its numeric template arguments, or the name itself."""
    if not symbol.startswith("_Z"):
        return symbol
    names, rest = [], symbol[2:].lstrip("NLS")
    while match := re.match(r"(\d+)", rest):
        start, length = match.end(), int(match.group(1))
        names.append(rest[start : start + length])
        rest = rest[start + length :]
    literals = _LITERALS.match(rest)
    arguments = re.findall(r"L[a-z](n?\d+)E", literals.group(1)) if literals else []
    shown = f"<{', '.join(arguments).replace('n', '-')}>" if arguments else ""
    return names[-1] + shown if names else symbol


def check_limits(record: Record, arch: Arch, kernels: list[dict[str, Any]], place: Place) -> None:
    """Raise SpillLimitExceeded when a kernel uses more than its record allows."""
    limits = record.limits
    for kernel in kernels:
        name = short_name(kernel["function"])
        spilled = kernel["spill_store_bytes"] + kernel["spill_load_bytes"]
        if limits.max_spill_bytes is not None and spilled > limits.max_spill_bytes:
            raise SpillLimitExceeded(
                f"{record.name} for {arch.name}: {name} spills {kernel['spill_store_bytes']} bytes of "
                f"stores and {kernel['spill_load_bytes']} of loads; the record allows {limits.max_spill_bytes} in all",
                hint="another nvcc may allocate otherwise; the record's limits stand in its program module",
                log=place.log,
                reproduction=place.reproduction,
            )
        if limits.max_registers is not None and kernel["registers"] > limits.max_registers:
            raise SpillLimitExceeded(
                f"{record.name} for {arch.name}: {name} uses {kernel['registers']} registers; the record "
                f"allows {limits.max_registers}",
                hint="another nvcc may allocate otherwise; the record's limits stand in its program module",
                log=place.log,
                reproduction=place.reproduction,
            )
