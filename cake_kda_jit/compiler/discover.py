"""Where compilers are looked for: one stated order, the same in a build, in ``doctor`` and in ``toolchain list``.

A host compiler: ``CAKE_KDA_JIT_CXX``, else g++, c++, clang++ of PATH. An nvcc: ``CAKE_KDA_JIT_NVCC``, a named
``CAKE_KDA_JIT_TOOLCHAIN_DIR``, ``CUDA_HOME``, PATH, /usr/local/cuda, the default toolchain directory beside the cache.
What the user named for this package comes first, what the machine has next, what was installed here last. The first
that exists is used; an nvcc that is there and does not run is an error, not a reason to take another silently.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from .. import config
from ..arch import Arch
from ..errors import BuildError, ToolchainNotFound
from .identify import identify_host, identify_nvcc
from .roots import named_path, user_roots
from .toolchain import Tool, Toolchain

HOST_COMPILERS = ("g++", "c++", "clang++")
USUAL_CUDA = "/usr/local/cuda"
INSTALL_COMMAND = "python -m cake_kda_jit toolchain install"


@dataclass(frozen=True)
class NvccPlace:
    """One place where nvcc is looked for: why there, and the path found there, or None."""

    reason: str
    path: str | None


def find_toolchain(arch: Arch) -> Toolchain:
    """Return the compilers for a target; raises ToolchainNotFound with the places looked at."""
    host = find_host_compiler()
    return Toolchain(host, find_nvcc(host) if arch.is_cuda else None)


def find_host_compiler() -> Tool:
    """Return ``CAKE_KDA_JIT_CXX``, else the first of g++, c++ and clang++; raises ToolchainNotFound."""
    named = config.read("CXX")
    for name in (named,) if named else HOST_COMPILERS:
        path = shutil.which(name)
        if path:
            return identify_host(os.path.abspath(path))
    if named:
        raise ToolchainNotFound(
            f"CAKE_KDA_JIT_CXX={named!r} is not an executable", hint="name a C++ compiler, or unset it"
        )
    raise ToolchainNotFound(
        f"no C++ compiler on PATH (looked for {', '.join(HOST_COMPILERS)})",
        hint="install g++, or set CAKE_KDA_JIT_CXX; nvcc needs one too",
    )


def nvcc_places() -> list[NvccPlace]:
    """Return every place where nvcc is looked for, in order; a named nvcc is the only one."""
    named = config.read("NVCC")
    if named:
        return [NvccPlace("CAKE_KDA_JIT_NVCC", shutil.which(named))]
    own = config.read("TOOLCHAIN_DIR")
    home = config.read("CUDA_HOME")
    places = _installed("CAKE_KDA_JIT_TOOLCHAIN_DIR", named_path(own)) if own else []
    places.append(NvccPlace(f"CUDA_HOME={home}", _executable(home, "bin")) if home else NvccPlace("CUDA_HOME", None))
    places.append(NvccPlace("PATH", shutil.which("nvcc")))
    places.append(NvccPlace(f"{USUAL_CUDA}/bin", _executable(USUAL_CUDA, "bin")))
    if not own:
        for root in user_roots():
            places += _installed("toolchain install", root / "toolchains")
    return places


def _executable(*parts: str) -> str | None:
    return shutil.which(os.path.join(*parts, "nvcc"))


def _installed(reason: str, directory: Path) -> list[NvccPlace]:
    """Return the toolchains that ``toolchain install`` put into a directory, newest first."""
    found = [(_release_of(path), str(path)) for path in directory.glob("cuda-*/nvidia/cu*/bin/nvcc")]
    places = [NvccPlace(f"{reason}: {directory}", path) for _, path in sorted(found, reverse=True)]
    return places or [NvccPlace(f"{reason}: {directory}", None)]


def _release_of(nvcc: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", nvcc.parents[3].name)]


def find_nvcc(host: Tool) -> Tool:
    """Return the nvcc of the first place that has one; raises ToolchainNotFound with all places.

    A named nvcc is run as it is. One that was found is run past its wrapper, so that the order of PATH changes nothing.
    """
    places = nvcc_places()
    for place in places:
        if place.path is not None:
            return _tool_of(place, host)
    if config.read("NVCC"):
        raise ToolchainNotFound(
            f"CAKE_KDA_JIT_NVCC={config.read('NVCC')!r} is not an executable", hint="name one, or unset it"
        )
    looked = ", ".join(place.reason if "=" in place.reason else _unset(place.reason) for place in places)
    raise ToolchainNotFound(
        f"no nvcc found; looked at CAKE_KDA_JIT_NVCC (unset), {looked}",
        hint=f"`{INSTALL_COMMAND}` installs one; or install a CUDA toolkit, or set CUDA_HOME or CAKE_KDA_JIT_NVCC, "
        "or use prebuilt kernels",
    )


def _unset(reason: str) -> str:
    return "CUDA_HOME (unset)" if reason == "CUDA_HOME" else reason


def _tool_of(place: NvccPlace, host: Tool) -> Tool:
    found = identify_nvcc(os.path.abspath(place.path), host)
    real = found.facts["nvcc"]
    return found if config.read("NVCC") or real == found.path else identify_nvcc(real, host)


def all_nvccs(host: Tool) -> list[tuple[NvccPlace, Tool | None, BuildError | None]]:
    """Return every place with the nvcc there, or the error of one that does not run; the first tool is the one used."""
    result = []
    for place in nvcc_places():
        try:
            result.append((place, _tool_of(place, host) if place.path else None, None))
        except BuildError as error:
            result.append((place, None, error))
    return result


def others_that_know(arch: Arch, toolchain: Toolchain) -> list[Tool]:
    """Return the nvccs found elsewhere than the one used that know a target."""
    found: dict[str, Tool] = {}
    for _, tool, _ in all_nvccs(toolchain.host):
        if tool is not None and tool.path != toolchain.nvcc.path and knows(tool, arch):
            found.setdefault(tool.path, tool)
    return list(found.values())


def knows(nvcc: Tool, arch: Arch) -> bool:
    """Whether an nvcc generates code for a target, by its release and by its own list. Starts no process."""
    if nvcc.release is not None and nvcc.release < arch.minimum_nvcc:
        return False
    codes = nvcc.facts.get("codes")
    return not codes or arch.name.rstrip("a") in codes
