"""Run ninja inside a private staging directory, as a process group that ends with us.

ninja judges freshness by mtime alone, so it never judges the cache: every run starts from an empty directory.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import config
from ..errors import ToolchainNotFound
from .artifact import COMMAND, LOG, NINJA_FILE
from .toolchain import clean_environment

GRACE_SECONDS = 2.0

# Standard input is a pipe that this process holds: when it dies, however it dies, the pipe ends, and a watcher in the
# background kills the process group. No compiler goes on for nobody.
_WATCHED = 'exec 3<&0; (read _ <&3; kill -9 0) & exec "$0" "$@" </dev/null 3<&-'

_running: set[subprocess.Popen] = set()


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ninja's exit status, None after a timeout; and all that it and the compiler printed."""

    status: int | None
    log: str


def find_ninja() -> str:
    """Return ``CAKE_KDA_JIT_NINJA``, else ninja of its Python package, else of PATH; raises ToolchainNotFound."""
    named = config.read("NINJA")
    if named:
        path = shutil.which(named)
        if path is None:
            raise ToolchainNotFound(f"CAKE_KDA_JIT_NINJA={named!r} is not an executable", hint="name one, or unset it")
        return os.path.abspath(path)
    try:
        import ninja  # found through its package, so that an environment need not be activated
    except ImportError:
        path = shutil.which("ninja")
    else:
        path = shutil.which("ninja", path=ninja.BIN_DIR) or shutil.which("ninja")
    if path is None:
        raise ToolchainNotFound("ninja was not found, as a Python package or on PATH", hint="pip install ninja")
    return os.path.abspath(path)


def write_build_file(staging: Path, command: Sequence[str], source: str, library: str) -> None:
    """Write ``build.ninja``, and the same command as a script for a person to repeat."""
    line = shlex.join(command)
    (staging / NINJA_FILE).write_text(
        # In the console pool a command stays in ninja's process group, which can then be ended as a whole, and its
        # output is in the log even if ninja never gets to print it.
        f"rule compile\n  command = {line.replace('$', '$$')}\n  description = {library}\n  pool = console\n\n"
        f"build {_path(library)}: compile {_path(source)}\n",
        encoding="utf-8",
    )
    (staging / COMMAND).write_text(f'cd "$(dirname "$0")" && {line}\n', encoding="utf-8")


def _path(name: str) -> str:
    return name.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def run_ninja(staging: Path) -> Outcome:
    """Run ninja in a staging directory, for ``CAKE_KDA_JIT_COMPILE_TIMEOUT`` seconds at most.

    The log is written beside the source. On a timeout, an interrupt or any other exception the whole process group is
    killed before this returns or raises.
    """
    temporary = staging / "tmp"
    temporary.mkdir()
    # Relative, because nvcc hands it unquoted to a shell: a cache's path may hold a dollar sign or a quote.
    environment = clean_environment(TMPDIR=temporary.name)
    with open(staging / LOG, "wb") as log:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHED, find_ninja(), "-v", "-j1"],
            cwd=staging,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(process)
        try:
            status = process.wait(config.read("COMPILE_TIMEOUT"))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_group(process)
            _running.discard(process)
            process.stdin.close()
    shutil.rmtree(temporary, ignore_errors=True)
    with contextlib.suppress(OSError):
        (staging / ".ninja_log").unlink()
    return Outcome(status, (staging / LOG).read_text(encoding="utf-8", errors="replace"))


def stop_all() -> None:
    """Kill every run of this process: for an interrupt that arrives in another thread than the runs'."""
    for process in list(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _end_group(process: subprocess.Popen) -> None:
    """Kill what is left of a process group; after a normal end nothing is."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _forget_after_fork() -> None:
    # A child must neither end the parent's compilations nor keep them alive.
    for process in _running:
        with contextlib.suppress(OSError):
            process.stdin.close()
    _running.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
