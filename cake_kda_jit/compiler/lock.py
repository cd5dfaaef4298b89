"""One builder per build key: a file lock with a sidecar that tells who holds it.

The lock only spares work. What keeps a cache right is the rename of a whole entry, so where the file system cannot
lock, building goes on without.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import config
from ..errors import LockTimeout
from . import flock
from .memo import write_atomically
from .progress import PATIENCE_SECONDS, say
from .roots import VERSION_DIR

HEARTBEAT_SECONDS = 1.0
POLL_SECONDS = 0.05

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_warned: set[Path] = set()


def locks_directory(root: Path) -> Path:
    """Return where the build locks of a cache stand."""
    return root / VERSION_DIR / ".locks"


@contextlib.contextmanager
def build_lock(root: Path, name: str) -> Iterator[None]:
    """Hold the lock of one entry, waiting for its holder as long as that one is alive.

    Raises LockTimeout when ``CAKE_KDA_JIT_LOCK_TIMEOUT`` seconds pass without a heartbeat of the holder.
    """
    directory = locks_directory(root)
    directory.mkdir(parents=True, exist_ok=True)
    holder = directory / f"{name}.holder"
    handle = _acquire(directory / f"{name}.lock", holder, name)
    if handle is None:
        yield
        return
    try:
        left_behind = read_holder(holder)
        if left_behind is not None:
            say(f"{name}: took over from {shown(left_behind)}, which ended without finishing", always=True)
        with _heartbeat(holder):
            yield
    finally:
        with contextlib.suppress(OSError):
            holder.unlink()
        flock.release(handle)


def _acquire(path: Path, holder: Path, name: str) -> int | None:
    """Return the locked file once it is held, or None where the file system cannot lock."""
    limit = config.read("LOCK_TIMEOUT")
    began = last_sign = time.monotonic()
    heartbeat: Any = None
    patience = PATIENCE_SECONDS
    reopened = False
    while True:
        try:
            return flock.lock_file(path)
        except flock.Busy:
            pass
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise
            if reopened:
                _warn_lock_free(path.parent, error)
                return None
            reopened = True
            continue
        now, known = time.monotonic(), read_holder(holder)
        if known is not None and known["heartbeat"] != heartbeat:
            heartbeat, last_sign = known["heartbeat"], now
        if now - last_sign > limit:
            raise _lock_timeout(name, path, known, now - last_sign)
        if now - began > patience:
            say(f"{name}: waiting for {shown(known)} ({now - began:.0f} s)", always=True)
            patience *= 2
        time.sleep(POLL_SECONDS)


def _lock_timeout(name: str, path: Path, known: dict[str, Any] | None, silent: float) -> LockTimeout:
    return LockTimeout(
        f"{name}: the build lock is held by {shown(known)}, without a sign of life for {silent:.1f} s",
        hint=f"end that process, or set CAKE_KDA_JIT_LOCK_TIMEOUT to more seconds; the lock is {path}",
    )


def _warn_lock_free(directory: Path, error: Exception) -> None:
    if directory not in _warned:
        _warned.add(directory)
        warnings.warn(
            f"{directory} cannot be locked ({error}); building without locks, so processes may compile one kernel "
            "twice. Set CAKE_KDA_JIT_CACHE_DIR to a local file system to avoid that.",
            RuntimeWarning,
            stacklevel=2,
        )


@contextlib.contextmanager
def _heartbeat(holder: Path) -> Iterator[None]:
    """Write the sidecar now and each second until the block ends."""
    facts = {"pid": os.getpid(), "host": socket.gethostname(), "start": time.time()}
    ended = threading.Event()

    def beat() -> None:
        count = 0
        while True:
            with contextlib.suppress(OSError):
                write_atomically(holder, json.dumps({**facts, "heartbeat": count}))
            count += 1
            if ended.wait(HEARTBEAT_SECONDS):
                return

    thread = threading.Thread(target=beat, name="cake_kda_jit heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@dataclass(frozen=True)
class HeldLock:
    """A build lock that a process holds now: of which entry, who holds it in words, and its file.

    ``silent_seconds`` is the time since the holder's last heartbeat, None if it never gave one.
    """

    name: str
    holder: str
    path: Path
    silent_seconds: float | None


def held_locks(root: Path) -> list[HeldLock]:
    """Return the build locks of a cache that are held now. A lock that nobody holds is tried and let go."""
    found = []
    for path in sorted(locks_directory(root).glob("*.lock")):
        try:
            flock.release(flock.lock_existing(path))
        except flock.Busy:
            holder = path.with_suffix(".holder")
            silent = None
            with contextlib.suppress(OSError):
                silent = max(time.time() - holder.stat().st_mtime, 0.0)
            found.append(HeldLock(path.stem, shown(read_holder(holder)), path, silent))
        except OSError:
            continue  # gone meanwhile, or the file system cannot lock, which the caller has tested
    return found


def read_holder(holder: Path) -> dict[str, Any] | None:
    """Return what a lock's sidecar says of its holder, or None."""
    try:
        known = json.loads(holder.read_bytes())
        return known if {"pid", "host", "start", "heartbeat"} <= known.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def shown(known: dict[str, Any] | None) -> str:
    """Return a holder in words."""
    if known is None:
        return "another process"
    return f"process {known['pid']} on {known['host']}, building since {time.time() - known['start']:.0f} s ago"
