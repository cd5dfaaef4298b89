"""Install a CUDA compiler from Python packages into a directory of its own.

A machine with a driver and g++ alone can then compile for every target. The directory is not that of the running
environment, so that no other package's pins can replace a part of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import sys
import tempfile
from pathlib import Path

from .. import config
from ..arch import ARCHES
from ..errors import CacheNotWritable, ConfigError, ToolchainMismatch, ToolchainNotFound
from .check import check_host_limit, check_parts
from .discover import find_host_compiler
from .identify import identify_nvcc
from .probe import probe_nvcc
from .progress import step
from .roots import get_writable_root, named_path
from .toolchain import Tool, Toolchain, run_tool

NEWEST = max(arch.minimum_nvcc for arch in ARCHES.values())
"""The first release that knows every target."""

DEFAULT_VERSION = f"{NEWEST[0]}.{NEWEST[1]}"
FIRST_MAJOR = 13  # earlier nvcc packages hold no nvcc
INSTALL_SECONDS = 1800.0

_SAME_RELEASE = (
    "nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime",
    "nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm",  # for `report`
)  # fmt: skip


def toolchain_directory() -> Path:
    """Return where toolchains are installed: ``CAKE_KDA_JIT_TOOLCHAIN_DIR``, else beside the user cache's entries."""
    named = config.read("TOOLCHAIN_DIR")
    return named_path(named) if named else get_writable_root() / "toolchains"


def requirements(version: str) -> list[str]:
    """Return the packages of a toolchain; raises ConfigError for a version that cannot be installed so."""
    match = re.fullmatch(r"(\d+)\.(\d+)", version)
    if match is None or int(match.group(1)) < FIRST_MAJOR:
        raise ConfigError(
            f"toolchain version {version!r} is not valid; accepted: X.Y from {FIRST_MAJOR}.0 on, e.g. {DEFAULT_VERSION}"
        )
    major, minor = match.groups()
    # The headers of the C++ library have releases of their own; none newer than nvcc is taken.
    cccl = f"nvidia-cuda-cccl>={major},<{major}.{int(minor) + 1}"
    return [f"{name}=={version}.*" for name in _SAME_RELEASE] + [cccl]


def install_toolchain(version: str = DEFAULT_VERSION, *, force: bool = False) -> Tool:
    """Install nvcc of a release, prove that it compiles and links, and return it; one that is there is returned.

    Raises ConfigError for a version that is none, ToolchainNotFound when pip fails, ToolchainMismatch or
    HostCompilerUnsupported when the parts do not fit each other or this machine's C++ compiler.
    """
    packages = requirements(version)
    host = find_host_compiler()
    parent = toolchain_directory()
    final = parent / f"cuda-{version}"
    present = next(iter(final.glob("nvidia/cu*/bin/nvcc")), None)
    if present is not None and not force:
        return identify_nvcc(str(present), host)
    staging = _make_staging(parent)
    try:
        with step(f"installing CUDA {version} into {final}"):
            _run_pip(packages, staging)
        nvcc = next(iter(staging.glob("nvidia/cu*/bin/nvcc")), None)
        if nvcc is None:
            raise ToolchainNotFound(f"the packages of CUDA {version} hold no nvcc", hint="install another version")
        with step("testing it"):
            _prove(nvcc, host)
        if force or not any(final.glob("nvidia/cu*/bin/nvcc")):
            shutil.rmtree(final, ignore_errors=True)
        staging.chmod(0o755)
        with contextlib.suppress(OSError):  # another process was faster: what it proved is as good
            staging.rename(final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return identify_nvcc(str(final / nvcc.relative_to(staging)), host)


def _make_staging(parent: Path) -> Path:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".installing-", dir=parent))
    except OSError as error:
        raise CacheNotWritable(
            f"the toolchain directory {parent} cannot be written: {error.strerror}",
            hint="set CAKE_KDA_JIT_TOOLCHAIN_DIR to a directory that you can write",
        ) from None


def _prove(nvcc: Path, host: Tool) -> None:
    tool = identify_nvcc(str(nvcc), host)
    check_parts(tool)
    toolchain = Toolchain(host, tool)
    check_host_limit(toolchain)
    fault = probe_nvcc(toolchain)
    if fault is not None:
        raise ToolchainMismatch(
            f"the installed nvcc {tool.identity['version']} does not compile: {fault}",
            hint="install another version with --version",
        )


def _run_pip(packages: list[str], target: Path) -> None:
    options = ["--target", str(target), "--no-deps", "--only-binary", ":all:"]
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    elif shutil.which("uv"):
        command = [shutil.which("uv"), "pip", "install", "--quiet", "--python", sys.executable]
    else:
        raise ToolchainNotFound(
            f"this Python ({sys.executable}) has no pip, and there is no uv on PATH",
            hint=f"python -m ensurepip, or on another machine: pip download {' '.join(packages)}",
        )
    status, out, err = run_tool([*command, *options, *packages], seconds=INSTALL_SECONDS)
    if status:
        lines = [line for line in (err or out).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        raise ToolchainNotFound(
            f"pip could not install {' '.join(packages)}",
            first_error=(errors or lines or [f"exit status {status}"])[0].strip(),
            hint="is a package index reachable? pip's own settings (PIP_INDEX_URL) apply",
            reproduction=" ".join([*command, "--target", "DIR", *options[2:], *packages]),
        )
