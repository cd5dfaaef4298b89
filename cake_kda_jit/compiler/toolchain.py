"""What a compiler is to us, and the one way to run one for a question.

A toolchain is identified by the content of its real binaries: the nvcc on PATH is often a wrapper script, and two
builds of one version may generate different code.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import config

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

    @property
    def release(self) -> tuple[int, int] | None:
        """(major, minor) of its version, or None when it does not say."""
        match = re.match(r"(\d+)\.(\d+)", self.identity["version"])
        return (int(match.group(1)), int(match.group(2))) if match else None


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


def clean_environment(**changes: str) -> dict[str, str]:
    """Return the environment for compilers: no variable that adds flags or search paths, messages in English."""
    return config.environment(without=SCRUBBED, **{"LC_ALL": "C", **changes})


def run_tool(command: Sequence[str], *, seconds: float = PROBE_SECONDS, cwd: str | None = None) -> tuple[int, str, str]:
    """Run a tool for a question or a probe; returns (exit status, standard output, standard error).

    A tool that cannot be started or does not end in time has status 127 and says why on standard error.
    """
    try:
        done = subprocess.run(
            list(command), env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds,
            cwd=cwd,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, "", str(error)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
