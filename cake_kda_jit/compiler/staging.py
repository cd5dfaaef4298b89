"""Private directories in which kernels are built, and the removal of those that a dead builder left.

    <root>/v1/.staging/<name>.<random>            one build
    <root>/v1/.staging/<name>.<random>.builder    locked by the builder for as long as it lives

Nothing of a crashed build is reused: its compiler may still be writing there.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from . import flock
from .roots import VERSION_DIR

ABANDONED_SECONDS = 24 * 3600.0
"""Age at which a directory whose builder cannot be asked, for want of locks, counts as left behind."""

_SUFFIX = ".builder"


def staging_parent(root: Path) -> Path:
    """Return where the builds of a cache take place."""
    return root / VERSION_DIR / ".staging"


class Staging:
    """One build's private directory; ``keep`` leaves it where it is for as long as this process lives."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.is_kept = False

    def keep(self) -> None:
        """Do not remove the directory at the end: the build's result is used where it lies."""
        self.is_kept = True


@contextlib.contextmanager
def staging_directory(root: Path, name: str) -> Iterator[Staging]:
    """Make a private directory on the cache's file system for one build; it is removed unless moved away or kept."""
    parent = staging_parent(root)
    parent.mkdir(parents=True, exist_ok=True)
    staging = Staging(parent / f"{name}.{secrets.token_hex(4)}")
    sign = _sign_of(staging.directory)
    try:
        handle = flock.lock_file(sign)
    except (OSError, flock.Busy):
        handle = None  # without locks the directory's age decides
    try:
        staging.directory.mkdir()
        yield staging
    finally:
        if not staging.is_kept:
            shutil.rmtree(staging.directory, ignore_errors=True)
            with contextlib.suppress(OSError):
                sign.unlink()
            if handle is not None:
                flock.release(handle)


def remove_abandoned(root: Path) -> list[Path]:
    """Remove what dead builders left, never what belongs to a living one; returns the removed directories.

    What cannot be removed now is left for the next time.
    """
    removed = []
    for path in _listing(staging_parent(root)):
        if path.name.endswith(_SUFFIX):
            directory = path.with_name(path.name.removesuffix(_SUFFIX))
            if not directory.exists():
                _remove_dead(directory)
        elif _remove_dead(path):
            removed.append(path)
    return removed


def _remove_dead(path: Path) -> bool:
    """Remove a directory and its sign if its builder is dead; whether it is gone."""
    handle = _lock_of_dead(path)
    if handle is None:
        return False
    shutil.rmtree(path, ignore_errors=True)
    is_gone = not path.exists()
    if is_gone:
        with contextlib.suppress(OSError):
            _sign_of(path).unlink()
    if handle >= 0:
        flock.release(handle)
    return is_gone


def _lock_of_dead(path: Path) -> int | None:
    """Return the lock of a directory whose builder is dead, -1 if its age tells so, None if it may be alive."""
    sign = _sign_of(path)
    if sign.exists():
        try:
            return flock.lock_file(sign)
        except flock.Busy:
            return None
        except OSError:
            pass
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
            return -1
    return None


def _sign_of(directory: Path) -> Path:
    return directory.with_name(directory.name + _SUFFIX)


def _listing(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
