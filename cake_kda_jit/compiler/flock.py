"""Advisory locks on files: held by an open file, gone with the process, and not kept alive by a fork.

The standard library's own call is used, so that nothing is imported on a hit and the errors of a file system that
cannot lock arrive as they are.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

_CREATE_MODE = 0o666  # less the umask: in a cache shared by a group, its members lock the same files
_GONE = (errno.ENOENT, errno.ESTALE)

_exclusive: set[int] = set()
_guard = threading.Lock()


class Busy(Exception):
    """Somebody else holds the lock."""


def lock_file(path: Path) -> int:
    """Return an open file that holds the exclusive lock of ``path``, which is created where needed.

    Raises Busy at once if another holds it, OSError where the file system cannot lock.
    """
    while True:
        handle = _open(path)
        try:
            _flock(handle, fcntl.LOCK_EX)
            if _is_same_file(handle, path):
                break
        except BaseException:
            os.close(handle)
            raise
        # The file was removed between opening and locking it: a lock on it would keep nobody out.
        os.close(handle)
    with _guard:
        _exclusive.add(handle)
    return handle


def share(path: Path) -> int:
    """Return an open file that holds a shared lock of an existing file; raises Busy or OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _flock(handle, fcntl.LOCK_SH)
    except BaseException:
        os.close(handle)
        raise
    return handle


def lock_existing(path: Path) -> int:
    """Return an open file that holds the exclusive lock of an existing file; raises Busy or OSError."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _flock(handle, fcntl.LOCK_EX)
    except BaseException:
        os.close(handle)
        raise
    with _guard:
        _exclusive.add(handle)
    return handle


def release(handle: int) -> None:
    """Close a locked file, which ends the lock."""
    with _guard:
        if handle not in _exclusive:  # after a fork the child's copy is closed already
            return
        _exclusive.discard(handle)
    os.close(handle)


def _flock(handle: int, kind: int) -> None:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy from None


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _CREATE_MODE)
    except PermissionError:
        # Another user's lock file: it can still be locked through a reader's eyes.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise


def _forget_after_fork() -> None:
    # A child that outlives its parent would hold the parent's locks with nobody behind them.
    global _guard
    _guard = threading.Lock()
    for handle in _exclusive:
        os.close(handle)
    _exclusive.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
