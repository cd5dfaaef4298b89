"""Keep a user cache below its size cap: least recently used entries go, those in use or locked stay.

Cleaning never fails a build: what cannot be removed now (a busy file, another user's) is left for the next time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .. import config
from . import flock
from .lock import locks_directory
from .roots import VERSION_DIR
from .staging import remove_abandoned
from .usage import last_used, stamp_of

KEPT_SECONDS = 7 * 24 * 3600.0
"""How long failed builds and quarantined entries are kept for somebody to look at."""

RECENT_SECONDS = 3600.0
"""Where files cannot be locked, an entry used within this time counts as in use."""

_LEFTOVERS = (".quarantine", ".failed")
_TRASH = ".trash"


@dataclass(frozen=True)
class CachedEntry:
    """One entry of a cache: its directory, its size in bytes and when it was last used (seconds since the epoch)."""

    directory: Path
    num_bytes: int
    last_used: float

    @property
    def arch(self) -> str:
        """Name of the target."""
        return self.directory.parent.name

    @property
    def name(self) -> str:
        """``<program>__<variant>.<key12>``."""
        return self.directory.name


@dataclass
class Collected:
    """What a collection did: entries removed, entries that stay although they should go and why, bytes after it."""

    removed: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    freed_bytes: int = 0
    num_bytes: int = 0


def list_entries(root: Path) -> list[CachedEntry]:
    """Return the entries of a cache, least recently used first."""
    found = []
    for parent in _children(root / VERSION_DIR):
        if not parent.name.startswith("."):
            found += [CachedEntry(path, size_of(path), last_used(root, path)) for path in _children(parent)]
    return sorted((e for e in found if not e.name.startswith(".")), key=lambda entry: (entry.last_used, entry.name))


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory."""
    total = 0
    with contextlib.suppress(OSError):
        if not path.is_dir():
            return path.stat().st_size
        for child in _children(path):
            total += size_of(child)
    return total


def collect(root: Path, max_bytes: int | None = None) -> Collected:
    """Bring a user cache below ``max_bytes``, by default CAKE_KDA_JIT_CACHE_MAX_BYTES, and clear what is abandoned."""
    limit = config.read("CACHE_MAX_BYTES") if max_bytes is None else max_bytes
    done = Collected()
    remove_abandoned(root)
    _empty_trash(root)
    _remove_temporaries(root)
    leftovers = sorted(_leftovers(root), key=lambda pair: pair[1])
    for path, time_left in leftovers:
        if time.time() - time_left > KEPT_SECONDS:
            _remove_leftover(root, path, done)
    entries = list_entries(root)
    present = [(path, size_of(path)) for path, _ in leftovers if path.exists()]
    done.num_bytes = sum(entry.num_bytes for entry in entries) + sum(size for _, size in present)
    for path, size in present:
        if done.num_bytes > limit:
            _remove_leftover(root, path, done)
            done.num_bytes -= size
    for entry in entries:
        if done.num_bytes > limit:
            _collect_entry(root, entry, done)
    return done


def collect_quietly(root: Path) -> None:
    """Collect after a build, whose result never depends on it."""
    with contextlib.suppress(OSError):
        collect(root)


def clear(root: Path) -> Collected:
    """Remove every entry that is not in use, the memos, failed builds and quarantined entries."""
    done = collect(root, 0)
    for name in (".memo", ".used"):
        shutil.rmtree(root / VERSION_DIR / name, ignore_errors=True)
    return done


def _collect_entry(root: Path, entry: CachedEntry, done: Collected) -> None:
    why = remove_entry(root, entry)
    if why is None:
        done.removed.append(f"{entry.arch}/{entry.name}")
        done.freed_bytes += entry.num_bytes
        done.num_bytes -= entry.num_bytes
    else:
        done.kept[f"{entry.arch}/{entry.name}"] = why


def remove_entry(root: Path, entry: CachedEntry) -> str | None:
    """Remove an entry, or return why it stays."""
    lock = locks_directory(root) / f"{entry.name}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = flock.lock_file(lock)
    except flock.Busy:
        return "locked by a build"
    except OSError:
        handle = None
    try:
        why = _remove_unused(root, entry)
        if why is None and handle is not None:
            with contextlib.suppress(OSError):
                lock.unlink()
        return why
    finally:
        if handle is not None:
            flock.release(handle)


def is_in_use(entry: CachedEntry) -> bool:
    """Whether a process holds an entry's library, or may: where files cannot be locked, whether it was used lately."""
    with _exclusive(entry) as is_free:
        return not is_free


@contextlib.contextmanager
def _exclusive(entry: CachedEntry) -> Iterator[bool]:
    """Lock an entry's library if nobody holds it; gives whether the entry is free."""
    library = next(iter(entry.directory.glob("*.so")), None)
    handle = None
    is_free = True
    try:
        if library is not None:
            handle = flock.lock_existing(library)
    except flock.Busy:
        is_free = False
    except OSError as error:
        is_free = error.errno == errno.ENOENT or time.time() - entry.last_used > RECENT_SECONDS
    try:
        yield is_free
    finally:
        if handle is not None:
            flock.release(handle)


def _remove_unused(root: Path, entry: CachedEntry) -> str | None:
    with _exclusive(entry) as is_free:
        if not is_free:
            return "in use"
        # Renamed first: a reader sees the whole entry or none.
        trash = root / VERSION_DIR / _TRASH
        target = trash / f"{entry.name}.{time.time_ns()}"
        try:
            trash.mkdir(parents=True, exist_ok=True)
            os.rename(entry.directory, target)
        except OSError as error:
            return f"cannot be removed ({error.strerror})"
    with contextlib.suppress(OSError):
        stamp_of(root, entry.directory).unlink()
    shutil.rmtree(target, ignore_errors=True)
    return None


def _leftovers(root: Path) -> Iterator[tuple[Path, float]]:
    for name in _LEFTOVERS:
        for path in _children(root / VERSION_DIR / name):
            with contextlib.suppress(OSError):
                yield path, path.stat().st_mtime


def _remove_leftover(root: Path, path: Path, done: Collected) -> None:
    size = size_of(path)
    shutil.rmtree(path, ignore_errors=True)
    if not path.exists():
        done.removed.append(str(path.relative_to(root / VERSION_DIR)))
        done.freed_bytes += size


def _empty_trash(root: Path) -> None:
    for path in _children(root / VERSION_DIR / _TRASH):
        shutil.rmtree(path, ignore_errors=True)


def _remove_temporaries(root: Path) -> None:
    """Remove half-written small files of processes that were killed while writing one."""
    for name in (".locks", ".memo"):
        for path in _children(root / VERSION_DIR / name):
            with contextlib.suppress(OSError):
                if path.name.startswith(".") and time.time() - path.stat().st_mtime > RECENT_SECONDS:
                    path.unlink()


def _children(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
