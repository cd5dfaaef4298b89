"""Refuse before compiling what a compiler would refuse, or miscompile, with worse words."""

from __future__ import annotations

import platform

from ..arch import Arch
from ..errors import HostCompilerUnsupported, ToolchainMismatch, UnsupportedArch
from .discover import INSTALL_COMMAND, knows, others_that_know
from .toolchain import Tool, Toolchain, run_tool

_MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}


def machine_name(name: str) -> str:
    """Return one name for each kind of processor: ``AMD64`` is x86_64, ``arm64`` is aarch64."""
    return _MACHINES.get(name, name)


def check_versions(arch: Arch, toolchain: Toolchain) -> None:
    """Raise UnsupportedArch if the compilers are too old for the target or of another machine."""
    if arch.is_cuda:
        if not knows(toolchain.nvcc, arch):
            raise UnsupportedArch(
                f"nvcc {toolchain.nvcc.identity['version']} ({toolchain.nvcc.path}) does not know {arch.name}",
                hint=_newer_nvcc(arch, toolchain),
            )
        return
    machine = machine_name(platform.machine())
    if not arch.name.startswith(machine):
        raise UnsupportedArch(
            f"{arch.name} is not a target of this machine, which is {machine}",
            hint="build it on a machine of that architecture, or use a prebuilt directory",
        )
    target = toolchain.host.identity["target"]
    if target and machine_name(target.partition("-")[0]) != machine:
        raise UnsupportedArch(
            f"{toolchain.host.path} compiles for {target}, not for {arch.name}",
            hint="set CAKE_KDA_JIT_CXX to a compiler for this machine",
        )


def _newer_nvcc(arch: Arch, toolchain: Toolchain) -> str:
    others = others_that_know(arch, toolchain)
    if others:
        return f"nvcc {others[0].identity['version']} does: set CAKE_KDA_JIT_NVCC={others[0].path}"
    release = ".".join(map(str, arch.minimum_nvcc))
    return (
        f"nvcc {release} does: `{INSTALL_COMMAND} --version {release}` installs it; "
        "or set CAKE_KDA_JIT_NVCC or CUDA_HOME to one"
    )


def check_parts(nvcc: Tool) -> None:
    """Raise ToolchainMismatch if nvcc, its assembler and the headers that it reads are not of one release."""
    release = nvcc.release
    if release is None:
        return
    version, cudart, ptxas = nvcc.identity["version"], nvcc.identity["cudart"], nvcc.facts.get("ptxas")
    headers = (cudart // 1000, cudart % 1000 // 10)
    hint = (
        "packages of nvcc and of the CUDA runtime must be of one release: install matching ones, "
        f"or `{INSTALL_COMMAND} --version {release[0]}.{release[1]}`, which keeps its own directory"
    )
    if cudart and headers != release:
        raise ToolchainMismatch(
            f"nvcc {version} ({nvcc.path}) would compile with headers of CUDA {headers[0]}.{headers[1]} "
            f"(CUDART_VERSION {cudart} under {nvcc.facts.get('root')})",
            hint=hint,
        )
    if ptxas and tuple(ptxas) != release:
        raise ToolchainMismatch(f"nvcc {version} ({nvcc.path}) would run ptxas {ptxas[0]}.{ptxas[1]}", hint=hint)


def check_host_limit(toolchain: Toolchain, extra_flags: tuple[str, ...] = ()) -> None:
    """Raise HostCompilerUnsupported if the host compiler is newer than the toolkit's crt/host_config.h accepts."""
    if "-allow-unsupported-compiler" in extra_flags:
        return
    host, limits = toolchain.host, toolchain.nvcc.facts.get("host_limits", {})
    for kind, name in (("gnu", "gcc"), ("clang", "clang")):
        actual, limit = host.facts.get(kind, 0), limits.get(kind, 0)
        if limit and actual > limit:
            raise HostCompilerUnsupported(
                f"{host.path} is {name} {actual}; nvcc {toolchain.nvcc.identity['version']} ({toolchain.nvcc.path}) "
                f"accepts {name} up to {limit}, by its crt/host_config.h",
                hint=f"install {'g++' if kind == 'gnu' else name + '++'}-{limit} and set CAKE_KDA_JIT_CXX to it, "
                "or use a newer nvcc",
            )


def check_target(arch: Arch, toolchain: Toolchain, extra_flags: tuple[str, ...] = ()) -> None:
    """Raise the typed error of compilers that do not fit each other or the target, before anything is compiled."""
    check_versions(arch, toolchain)
    if arch.is_cuda:
        check_parts(toolchain.nvcc)
        check_host_limit(toolchain, extra_flags)
        return
    status, _, message = run_tool([toolchain.host.path, *arch.cpu_flags, "-fsyntax-only", "-x", "c++", "/dev/null"])
    if status and "march" in message:
        raise UnsupportedArch(
            f"{toolchain.host.path} ({toolchain.host.identity['version']}) does not know {' '.join(arch.cpu_flags)}",
            hint=f"{arch.name} needs gcc 11 or clang 12; set CAKE_KDA_JIT_CXX",
        )
