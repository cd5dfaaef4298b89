"""Command lines, with tokens where paths stand, so that the same build on two machines has the same key."""

from __future__ import annotations

import platform
import shlex

from .. import config
from ..arch import Arch
from ..errors import UnsupportedArch
from ..record import Record
from .artifact import library_name
from .request import Request
from .toolchain import Toolchain, run_tool

DEPFILE = "dependencies.d"

_MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}


def extra_flags() -> tuple[str, ...]:
    """Return ``CAKE_KDA_JIT_EXTRA_FLAGS``, split as a shell would."""
    return tuple(shlex.split(config.read("EXTRA_FLAGS")))


def compile_flags(record: Record, arch: Arch, toolchain: Toolchain) -> tuple[str, ...]:
    """Return the flags of a record for a target, with tokens such as ``{cxx}`` in place of paths."""
    keywords = record.build_keywords
    defines = tuple(f"-D{name}={value}" for name, value in keywords.defines)
    return (_cuda_flags(record, arch, toolchain) if arch.is_cuda else _cpu_flags(record, arch)) + defines


def _cpu_flags(record: Record, arch: Arch) -> tuple[str, ...]:
    keywords = record.build_keywords
    return (
        "-std=c++17",
        f"-O{keywords.opt_level}",
        # One rounding per operation on every machine: no multiply-add where the source has none.
        "-ffp-contract=off",
        *(("-ffast-math",) if keywords.fast_math else ()),
        *arch.cpu_flags,
        "-pthread",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        *(("-g1", "-fdebug-prefix-map={staging}=.") if keywords.lineinfo else ("-Wl,-s",)),
        "-Wl,-z,defs",
        "-Wall",
        "-Wextra",
    )


def _cuda_flags(record: Record, arch: Arch, toolchain: Toolchain) -> tuple[str, ...]:
    keywords = record.build_keywords
    facts = toolchain.nvcc.facts
    directory = facts["library_directory"]
    return (
        "-std=c++17",
        f"-O{keywords.opt_level}",
        f"-gencode={arch.gencode}",
        "-shared",
        "-cudart=static",
        "-ccbin={cxx}",
        "-Xptxas=-v,--warn-on-spills",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        "-Xlinker=-s",
        "-Xlinker=-z,defs",
        # Names of internal functions hold a digest of the source's absolute path, unless it is given as a bare name.
        *(("-Xcudafe=--orig_src_path_name={source}",) if facts["source_path_option"] else ()),
        *((f"-L{{cuda}}/{directory}",) if directory else ()),
        *(("-lineinfo",) if keywords.lineinfo else ()),
        *((f"-maxrregcount={keywords.max_registers}",) if keywords.max_registers else ()),
        *(("-use_fast_math",) if keywords.fast_math else ()),
    )


def command_line(request: Request, staging: str) -> list[str]:
    """Return the one command that compiles and links a request's source inside the staging directory."""
    toolchain = request.toolchain
    compiler = "{nvcc}" if toolchain.nvcc else "{cxx}"
    outputs = ("-MD", "-MF", DEPFILE, "-o", library_name(request.record), request.source.filename)
    tokens = {**toolchain.tokens, "{staging}": staging, "{source}": request.source.filename}
    return [_expand(part, tokens) for part in (compiler, *request.flags)] + [*request.extra_flags, *outputs]


def _expand(text: str, tokens: dict[str, str]) -> str:
    for token, path in tokens.items():
        text = text.replace(token, path)
    return text


def check_versions(arch: Arch, toolchain: Toolchain) -> None:
    """Raise UnsupportedArch if the compilers are too old for the target or of another machine; starts no process."""
    if arch.is_cuda:
        release = toolchain.nvcc_release
        if release is not None and release < arch.minimum_nvcc:
            raise UnsupportedArch(
                f"nvcc {toolchain.nvcc.identity['version']} ({toolchain.nvcc.path}) does not know {arch.name}",
                hint=f"nvcc {'.'.join(map(str, arch.minimum_nvcc))} does: set CAKE_KDA_JIT_NVCC or CUDA_HOME",
            )
        return
    machine = _MACHINES.get(platform.machine(), platform.machine())
    if not arch.name.startswith(machine):
        raise UnsupportedArch(
            f"{arch.name} is not a target of this machine, which is {machine}",
            hint="build it on a machine of that architecture, or use a prebuilt directory",
        )
    target = toolchain.host.identity["target"]
    if target and _MACHINES.get(target.partition("-")[0], target.partition("-")[0]) != machine:
        raise UnsupportedArch(
            f"{toolchain.host.path} compiles for {target}, not for {arch.name}",
            hint="set CAKE_KDA_JIT_CXX to a compiler for this machine",
        )


def check_target(arch: Arch, toolchain: Toolchain) -> None:
    """Raise UnsupportedArch unless the compilers know the target; the host compiler is asked, before compiling."""
    check_versions(arch, toolchain)
    if arch.is_cuda:
        return
    status, _, message = run_tool([toolchain.host.path, *arch.cpu_flags, "-fsyntax-only", "-x", "c++", "/dev/null"])
    if status and "march" in message:
        raise UnsupportedArch(
            f"{toolchain.host.path} ({toolchain.host.identity['version']}) does not know {' '.join(arch.cpu_flags)}",
            hint=f"{arch.name} needs gcc 11 or clang 12; set CAKE_KDA_JIT_CXX",
        )
