"""Who uses an entry, and when it was last used: what the size cap needs to know.

A process that holds an Artifact holds a shared lock on its library, so an entry is in use as long as anybody could
open it. When an entry was last used stands beside the entries, which are themselves never written again:
``<root>/v1/.used/<arch>/<entry>``, an empty file with that time.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from pathlib import Path

from . import flock
from .artifact import Artifact
from .roots import VERSION_DIR

BUSY_SECONDS = 2.0

STAMP_SECONDS = 600.0
"""A newer stamp is not renewed: a hit stays as cheap as one ``stat``."""


def hold(artifact: Artifact) -> Artifact:
    """Mark an entry as in use for as long as the artifact exists; returns the artifact.

    Raises FileNotFoundError if the entry has just been removed. Where files cannot be locked nothing is marked.
    """
    end = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            handle = flock.share(artifact.library)
        except FileNotFoundError:
            raise
        except OSError:
            return artifact
        except flock.Busy:
            # Somebody asks whether it is in use, or removes it: both take a moment.
            if time.monotonic() > end:
                return artifact
            time.sleep(0.005)
        else:
            weakref.finalize(artifact, os.close, handle).atexit = False
            return artifact


def stamp(root: Path, directory: Path) -> None:
    """Note that an entry of a user cache is used now."""
    path = stamp_of(root, directory)
    with contextlib.suppress(OSError):
        try:
            if time.time() - path.stat().st_mtime < STAMP_SECONDS:
                return
            os.utime(path)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()


def last_used(root: Path, directory: Path) -> float:
    """Return when an entry was last used, in seconds since the epoch; when it was made if nobody said."""
    for path in (stamp_of(root, directory), directory):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def stamp_of(root: Path, directory: Path) -> Path:
    """Return the file that holds an entry's time of last use."""
    return root / VERSION_DIR / ".used" / directory.parent.name / directory.name
