"""Find the compilers and say exactly which ones they are.

A toolchain is identified by the content of its real binaries: the nvcc on PATH is often a wrapper script, and two
builds of one version may generate different code. Digesting them takes a while, so a memo keeps the identity for as
long as no binary's stat changes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import config
from ..arch import Arch
from ..errors import ToolchainNotFound
from . import memo
from .key import file_digest

HOST_COMPILERS = ("g++", "c++", "clang++")
USUAL_CUDA = "/usr/local/cuda"
PROBE_SECONDS = 60.0

NVCC_FLAG_VARIABLES = ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS")
"""Variables that would change nvcc's code without being in the key."""

SCRUBBED = NVCC_FLAG_VARIABLES + (
    "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "LD_RUN_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH",
    "CCC_OVERRIDE_OPTIONS", "DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES", "SOURCE_DATE_EPOCH", "NVCC_CCBIN",
    "CUDAFE_FLAGS", "PTXAS_FLAGS", "MAKEFLAGS", "NINJA_STATUS", "LANGUAGE",
)  # fmt: skip


@dataclass(frozen=True)
class Tool:
    """One compiler: the path that is run, what identifies it, and facts about it that stay out of the key."""

    path: str
    identity: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Toolchain:
    """The host compiler and, for CUDA targets, nvcc."""

    host: Tool
    nvcc: Tool | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What of the toolchain goes into the build key: versions and content digests, no path."""
        return {"host": self.host.identity, "cuda": self.nvcc.identity if self.nvcc else None}

    @property
    def tokens(self) -> dict[str, str]:
        """The paths that stand for the tokens of a tokenised command line."""
        paths = {"{cxx}": self.host.path}
        if self.nvcc:
            paths["{nvcc}"] = self.nvcc.path
            paths["{cuda}"] = self.nvcc.facts["root"]
        return paths

    @property
    def nvcc_release(self) -> tuple[int, int] | None:
        """nvcc's (major, minor), or None without nvcc or when it does not say."""
        match = re.match(r"(\d+)\.(\d+)", self.nvcc.identity["version"]) if self.nvcc else None
        return (int(match.group(1)), int(match.group(2))) if match else None


def clean_environment(**changes: str) -> dict[str, str]:
    """Return the environment for compilers: no variable that adds flags or search paths, messages in English."""
    return config.environment(without=SCRUBBED, **{"LC_ALL": "C", **changes})


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
            return _identified(os.path.abspath(path), "host", _describe_host)
    if named:
        raise ToolchainNotFound(
            f"CAKE_KDA_JIT_CXX={named!r} is not an executable", hint="name a C++ compiler, or unset it"
        )
    raise ToolchainNotFound(
        f"no C++ compiler on PATH (looked for {', '.join(HOST_COMPILERS)})",
        hint="install g++, or set CAKE_KDA_JIT_CXX; nvcc needs one too",
    )


def find_nvcc(host: Tool) -> Tool:
    """Return ``CAKE_KDA_JIT_NVCC``, else nvcc of CUDA_HOME, PATH or /usr/local/cuda; raises ToolchainNotFound.

    A named nvcc is run as it is. One that was found is run past its wrapper, so that the order of PATH changes nothing.
    """
    named = config.read("NVCC")
    if named:
        path = shutil.which(named)
        if path is None:
            raise ToolchainNotFound(f"CAKE_KDA_JIT_NVCC={named!r} is not an executable", hint="name one, or unset it")
        return _identified(os.path.abspath(path), "nvcc", lambda p: _describe_nvcc(p, host.path))
    home = config.read("CUDA_HOME")
    places = [os.path.join(home, "bin", "nvcc")] if home else []
    for place in [*places, "nvcc", os.path.join(USUAL_CUDA, "bin", "nvcc")]:
        path = shutil.which(place)
        if path:
            found = _identified(os.path.abspath(path), "nvcc", lambda p: _describe_nvcc(p, host.path))
            real = found.facts["nvcc"]
            return found if real == found.path else _identified(real, "nvcc", lambda p: _describe_nvcc(p, host.path))
    looked = f"CUDA_HOME={home!r}" if home else "CUDA_HOME (unset)"
    raise ToolchainNotFound(
        f"no nvcc found; looked at CAKE_KDA_JIT_NVCC (unset), {looked}, PATH, {USUAL_CUDA}/bin",
        hint="install a CUDA toolkit, set CUDA_HOME or CAKE_KDA_JIT_NVCC, or use prebuilt kernels",
    )


def _identified(path: str, kind: str, describe: Callable[[str], tuple[dict, dict, list[str]]]) -> Tool:
    """Return the tool at ``path`` from the memo, or describe it and remember that."""
    name = memo.tool_name(kind, path)
    known = memo.read_tool(name)
    if known is None:
        identity, facts, files = describe(path)
        memo.write_tool(name, files, {"identity": identity, "facts": facts})
    else:
        identity, facts = known["identity"], known["facts"]
    return Tool(path, identity, facts)


def run_tool(command: Sequence[str]) -> tuple[int, str, str]:
    """Run a compiler for a question about itself; returns (exit status, standard output, standard error)."""
    try:
        done = subprocess.run(
            list(command), env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, "", str(error)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def _describe_host(path: str) -> tuple[dict, dict, list[str]]:
    first_line = run_tool([path, "--version"])[1].partition("\n")[0].strip()
    # The first word is the name it was called by: g++ and c++ are one compiler.
    version = first_line.partition(" ")[2] or first_line
    target = run_tool([path, "-dumpmachine"])[1].strip()
    binaries = {"driver": os.path.realpath(path)}
    inner = run_tool([path, "-print-prog-name=cc1plus"])[1].strip()
    if os.path.isabs(inner) and os.path.isfile(inner):
        binaries["cc1plus"] = inner
    identity = {"version": version, "target": target, "binaries": _digests(binaries)}
    return identity, {}, [path, *binaries.values()]


def _describe_nvcc(path: str, host: str) -> tuple[dict, dict, list[str]]:
    match = re.search(r"release [\d.]+, V([\d.]+)", run_tool([path, "--version"])[1])
    command = [path, "--dryrun", "-ccbin", host, "-x", "cu", os.devnull, "-o", os.devnull]
    steps = run_tool(command)[2]
    dryrun = dict(re.findall(r"^#\$ (\w+)=(.*)$", steps, re.MULTILINE))
    here = dryrun.get("_HERE_", os.path.dirname(os.path.realpath(path)))
    root = os.path.normpath(dryrun.get("TOP", os.path.join(here, "..")))
    cicc = dryrun.get("CICC_PATH", os.path.join(root, "nvvm", "bin"))
    binaries = {name: os.path.join(here, name) for name in ("nvcc", "ptxas", "cudafe++", "nvcc.profile")}
    binaries["cicc"] = os.path.normpath(os.path.join(cicc, "cicc"))
    binaries = {name: file for name, file in binaries.items() if os.path.isfile(file)}
    real = binaries.get("nvcc", path)
    if not os.path.samefile(real, path):
        binaries["wrapper"] = path
    header = _first_file(root, ("include", "targets/*/include"), "cuda_runtime_api.h")
    identity = {
        "version": match.group(1) if match else "",
        "cudart": _cudart_version(header),
        "binaries": _digests(binaries),
    }
    library = _first_file(root, ("lib64", "targets/*/lib", "lib"), "libcudart_static.a")
    directory = os.path.dirname(library) if library else ""
    searched = [os.path.normpath(part) for part in re.findall(r'"-L([^"]*)"', dryrun.get("LIBRARIES", ""))]
    # Toolkits from pip have only lib/, which their nvcc does not search.
    unsearched = bool(directory) and not any(os.path.realpath(d) == os.path.realpath(directory) for d in searched)
    facts = {
        "nvcc": real,
        "root": root,
        "library_directory": os.path.relpath(directory, root) if unsearched else "",
        "source_path_option": "--orig_src_path_name" in steps,
    }
    return identity, facts, [path, *binaries.values(), *([header] if header else [])]


def _digests(binaries: dict[str, str]) -> dict[str, str]:
    return {name: file_digest(path) for name, path in sorted(binaries.items())}


def _first_file(root: str, directories: Sequence[str], name: str) -> str | None:
    for pattern in directories:
        for found in sorted(Path(root).glob(f"{pattern}/{name}")):
            return str(found)
    return None


def _cudart_version(header: str | None) -> int:
    if header is None:
        return 0
    text = Path(header).read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
    return int(match.group(1)) if match else 0
