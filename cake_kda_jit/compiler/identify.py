"""Say exactly which compiler stands at a path: identity for the key, facts for the checks.

Digesting the binaries takes a while, so a memo keeps both for as long as no binary's stat changes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import ToolchainNotFound
from . import memo
from .key import file_digest
from .toolchain import Tool, run_tool

Description = tuple[dict[str, Any], dict[str, Any], list[str]]  # identity, facts, the files that they were read from


def identify_host(path: str) -> Tool:
    """Return the host compiler at a path; raises ToolchainNotFound if it does not run."""
    return _identified(path, "host", _describe_host)


def identify_nvcc(path: str, host: Tool) -> Tool:
    """Return the nvcc at a path, as it is called there; raises ToolchainNotFound if it does not run."""
    return _identified(path, "nvcc", lambda p: _describe_nvcc(p, host.path))


def _identified(path: str, kind: str, describe: Callable[[str], Description]) -> Tool:
    """Return the tool at ``path`` from the memo, or describe it and remember that."""
    name = memo.tool_name(kind, path)
    known = memo.read_tool(name)
    if known is None:
        identity, facts, files = describe(path)
        memo.write_tool(name, files, {"identity": identity, "facts": facts})
    else:
        identity, facts = known["identity"], known["facts"]
    return Tool(path, identity, facts)


def _ask(command: Sequence[str], path: str) -> str:
    """Return what a compiler answers; raises ToolchainNotFound when it does not run at all."""
    status, out, err = run_tool(command)
    if status:
        said = (err.strip() or out.strip() or f"exit status {status}").splitlines()[-1]
        raise ToolchainNotFound(
            f"{path} does not run: {said}", hint="repair it, or name another with CAKE_KDA_JIT_NVCC or CAKE_KDA_JIT_CXX"
        )
    return out


def _describe_host(path: str) -> Description:
    first_line = _ask([path, "--version"], path).partition("\n")[0].strip()
    # The first word is the name it was called by: g++ and c++ are one compiler.
    version = first_line.partition(" ")[2] or first_line
    target = run_tool([path, "-dumpmachine"])[1].strip()
    macros = dict(re.findall(r"^#define (\w+) (\d+)$", _macros(path), re.MULTILINE))
    binaries = {"driver": os.path.realpath(path)}
    inner = run_tool([path, "-print-prog-name=cc1plus"])[1].strip()
    if os.path.isabs(inner) and os.path.isfile(inner):
        binaries["cc1plus"] = inner
    identity = {"version": version, "target": target, "binaries": _digests(binaries)}
    clang = int(macros.get("__clang_major__", 0))
    facts = {"clang": clang, "gnu": 0 if clang else int(macros.get("__GNUC__", 0))}
    return identity, facts, [path, *binaries.values()]


def _macros(path: str) -> str:
    return run_tool([path, "-dM", "-E", "-x", "c++", os.devnull])[1]


def _describe_nvcc(path: str, host: str) -> Description:
    match = re.search(r"release [\d.]+, V([\d.]+)", _ask([path, "--version"], path))
    steps = run_tool([path, "--dryrun", "-ccbin", host, "-x", "cu", os.devnull, "-o", os.devnull])[2]
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
    header = find_header(root, "cuda_runtime_api.h")
    limits = find_header(root, "crt/host_config.h")
    identity = {
        "version": match.group(1) if match else "",
        "cudart": _cudart_version(header),
        "binaries": _digests(binaries),
    }
    library = _first_file(root, ("lib64", "targets/*/lib", "lib"), "libcudart_static.a")
    directory = os.path.dirname(library) if library else ""
    searched = [os.path.normpath(part) for part in re.findall(r'"-L([^"]*)"', dryrun.get("LIBRARIES", ""))]
    # Toolkits from pip may have only lib/, which their nvcc does not search.
    unsearched = bool(directory) and not any(os.path.realpath(d) == os.path.realpath(directory) for d in searched)
    facts = {
        "nvcc": real,
        "root": root,
        "library_directory": os.path.relpath(directory, root) if unsearched else "",
        "source_path_option": "--orig_src_path_name" in steps,
        "codes": re.findall(r"^sm_\d+$", run_tool([path, "--list-gpu-code"])[1], re.MULTILINE),
        "ptxas": _tool_release(binaries.get("ptxas")),
        "host_limits": _host_limits(limits),
    }
    return identity, facts, [path, *binaries.values(), *(file for file in (header, limits) if file)]


def find_header(root: str, name: str) -> str | None:
    """Return the path of a header of the toolkit at ``root``, or None."""
    return _first_file(root, ("include", "targets/*/include"), name)


def _digests(binaries: dict[str, str]) -> dict[str, str]:
    return {name: file_digest(path) for name, path in sorted(binaries.items())}


def _first_file(root: str, directories: Sequence[str], name: str) -> str | None:
    for pattern in directories:
        for found in sorted(Path(root).glob(f"{pattern}/{name}")):
            return str(found)
    return None


def _cudart_version(header: str | None) -> int:
    match = re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", _text(header), re.MULTILINE)
    return int(match.group(1)) if match else 0


def _tool_release(path: str | None) -> list[int]:
    match = re.search(r"release (\d+)\.(\d+)", run_tool([path, "--version"])[1]) if path else None
    return [int(match.group(1)), int(match.group(2))] if match else []


def _host_limits(header: str | None) -> dict[str, int]:
    """Return the newest host compilers that the toolkit's own header accepts, 0 where it does not say."""
    text = _text(header)
    gnu = re.findall(r"^#if __GNUC__ > (\d+)", text, re.MULTILINE)
    # The last one is that of plain clang; those before are of embedded systems.
    clang = re.findall(r"^#if \(__clang_major__ >= (\d+)\)", text, re.MULTILINE)
    return {"gnu": int(gnu[-1]) if gnu else 0, "clang": int(clang[-1]) - 1 if clang else 0}


def _text(path: str | None) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace") if path else ""
