"""Where the caches are.

The user cache is ``CAKE_KDA_JIT_CACHE_DIR``, else ``$XDG_CACHE_HOME/cake_kda_jit``, else ``~/.cache/cake_kda_jit``;
when that default cannot be written, a directory of this user alone under TMPDIR, with one warning.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

from .. import config
from ..errors import CacheNotWritable
from .key import SCHEMA

VERSION_DIR = f"v{SCHEMA}"

_warned: set[Path] = set()


def named_path(text: str) -> Path:
    """Return a directory that a variable names: absolute, with ``~`` as the home that a shell would have put there."""
    with contextlib.suppress(RuntimeError):
        return Path(text).expanduser().absolute()
    return Path(text).absolute()


def named_root() -> Path | None:
    """Return the cache directory that the user named, or None."""
    named = config.read("CACHE_DIR")
    return named_path(named) if named else None


def named_layers(name: str) -> list[Path]:
    """Return the directories of ``PREBUILT`` or ``CACHE_RO``, in their order."""
    return [named_path(text) for text in config.read(name)]


def default_root() -> Path | None:
    """Return the default cache directory, or None when this user has no home directory."""
    base = config.read("XDG_CACHE_HOME")
    if base:
        return named_path(base) / "cake_kda_jit"
    try:
        return Path.home() / ".cache" / "cake_kda_jit"
    except RuntimeError:
        return None


def fallback_root() -> Path:
    """Return the directory under TMPDIR that stands in for a default which cannot be written."""
    return Path(config.read("TMPDIR")).absolute() / f"cake_kda_jit-{os.getuid()}"


def user_roots() -> list[Path]:
    """Return the user caches to look in, best first. Nothing is created."""
    named = named_root()
    if named is not None:
        return [named]
    default = default_root()
    fallback = fallback_root()
    return [*([default] if default else []), *([fallback] if _is_private(fallback) else [])]


def get_writable_root() -> Path:
    """Return the user cache to write to, created where needed.

    Raises CacheNotWritable when the user named a directory that cannot be written, or when no directory can.
    """
    named = named_root()
    if named is not None:
        fault = _write_fault(named)
        if fault is None:
            return named
        raise CacheNotWritable(
            f"CAKE_KDA_JIT_CACHE_DIR={str(named)!r} cannot be written: {fault}",
            hint="name a directory that you can write, or unset it for the default",
        )
    default = default_root()
    fault = "this user has no home directory" if default is None else _write_fault(default)
    if fault is None:
        return default
    fallback = fallback_root()
    second_fault = _private_fault(fallback)
    if second_fault is not None:
        raise CacheNotWritable(
            f"neither {default} ({fault}) nor {fallback} ({second_fault}) can be written",
            hint="set CAKE_KDA_JIT_CACHE_DIR to a directory that you can write",
        )
    if fallback not in _warned:
        _warned.add(fallback)
        warnings.warn(
            f"the kernel cache {default} cannot be written ({fault}); using {fallback}. "
            "Set CAKE_KDA_JIT_CACHE_DIR to choose another.",
            RuntimeWarning,
            stacklevel=2,
        )
    return fallback


def find_writable_root() -> Path | None:
    """Return the user cache to write to, or None; for what may be left unwritten."""
    try:
        return get_writable_root()
    except CacheNotWritable:
        return None


def _write_fault(root: Path) -> str | None:
    """Return why nothing can be written below ``root``, or None after having written there."""
    try:
        (root / VERSION_DIR).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root / VERSION_DIR):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _private_fault(root: Path) -> str | None:
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    # Another user who owns the directory could plant a library in it.
    return _write_fault(root) if _is_private(root) else "it belongs to another user or is open to others"


def _is_private(root: Path) -> bool:
    try:
        status = os.lstat(root)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
