"""Targets: what can be compiled for, and what each target can hold.

A target is named exactly (``sm_90a``, ``x86_64_v3``): there is no PTX fall-back and no substitute, so that one key
means one machine code.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from .errors import UnsupportedArch

FAMILIES = ("cpu", "smxx", "sm90")


@dataclass(frozen=True)
class Arch:
    """One compilation target.

    ``families`` are the template families that may be built for it, best first. ``shared_memory_bytes`` is what one
    CTA may use (0 on a CPU). ``minimum_nvcc`` is the first nvcc release that knows the target. ``cpu_flags`` go to the
    host compiler.
    """

    name: str
    kind: str
    families: tuple[str, ...]
    capability: tuple[int, int] = (0, 0)
    shared_memory_bytes: int = 0
    minimum_nvcc: tuple[int, int] = (0, 0)
    cpu_flags: tuple[str, ...] = ()

    @property
    def is_cuda(self) -> bool:
        """Whether nvcc compiles for this target."""
        return self.kind == "cuda"

    @property
    def gencode(self) -> str:
        """nvcc's ``-gencode`` value: machine code of exactly this target, no PTX."""
        suffix = self.name.removeprefix("sm_")
        return f"arch=compute_{suffix},code=sm_{suffix}"


def _cuda(name: str, capability: tuple[int, int], shared_kib: int, minimum_nvcc: tuple[int, int]) -> Arch:
    families = ("sm90", "smxx") if name == "sm_90a" else ("smxx",)
    return Arch(name, "cuda", families, capability, shared_kib * 1024, minimum_nvcc)


# Shared memory per CTA is the opt-in limit of the CUDA programming guide's table of technical specifications.
ARCHES: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("x86_64_v3", "cpu", ("cpu",), cpu_flags=("-march=x86-64-v3",)),
        Arch("x86_64", "cpu", ("cpu",), cpu_flags=("-march=x86-64",)),
        Arch("aarch64", "cpu", ("cpu",), cpu_flags=("-march=armv8-a",)),
        _cuda("sm_80", (8, 0), 163, (11, 0)),
        _cuda("sm_86", (8, 6), 99, (11, 1)),
        _cuda("sm_89", (8, 9), 99, (11, 8)),
        _cuda("sm_90a", (9, 0), 227, (12, 0)),
        _cuda("sm_100a", (10, 0), 227, (12, 8)),
        _cuda("sm_103a", (10, 3), 227, (12, 9)),
        _cuda("sm_107a", (10, 7), 227, (13, 5)),
        _cuda("sm_120a", (12, 0), 99, (12, 8)),
    )
}

CPU_ARCHES = tuple(name for name, arch in ARCHES.items() if not arch.is_cuda)
CUDA_ARCHES = tuple(name for name, arch in ARCHES.items() if arch.is_cuda)

# What the psABI asks of x86-64-v3, by the names that the kernel prints; "abm" stands for lzcnt.
_X86_64_V3_FLAGS = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())


def get_arch(name: str | Arch) -> Arch:
    """Return the target called ``name``; raises UnsupportedArch with the accepted names."""
    if isinstance(name, Arch):
        return name
    if name in ARCHES:
        return ARCHES[name]
    raise UnsupportedArch(f"target {name!r} is not known", hint=f"use one of {', '.join(ARCHES)}")


def arch_of_capability(major: int, minor: int) -> Arch:
    """Return the CUDA target of a device's compute capability, exactly."""
    for arch in ARCHES.values():
        if arch.is_cuda and arch.capability == (major, minor):
            return arch
    raise UnsupportedArch(
        f"a device of compute capability {major}.{minor} has no target here",
        hint=f"targets: {', '.join(CUDA_ARCHES)}; capabilities below 8.0 lack bf16 tensor cores",
    )


def host_arch(machine: str | None = None, cpuinfo: str | None = None) -> Arch:
    """Return the CPU target of this machine: ``x86_64_v3`` where the processor has it, else its baseline."""
    machine = platform.machine() if machine is None else machine
    if machine in ("x86_64", "AMD64"):
        has_v3 = _x86_64_v3_flags_present(_read_cpuinfo() if cpuinfo is None else cpuinfo)
        return ARCHES["x86_64_v3" if has_v3 else "x86_64"]
    if machine in ("aarch64", "arm64"):
        return ARCHES["aarch64"]
    raise UnsupportedArch(f"the processor {machine!r} has no target here", hint=f"CPU targets: {', '.join(CPU_ARCHES)}")


def _read_cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def _x86_64_v3_flags_present(cpuinfo: str) -> bool:
    for line in cpuinfo.splitlines():
        if line.startswith("flags"):
            return _X86_64_V3_FLAGS <= set(line.partition(":")[2].split())
    return False
