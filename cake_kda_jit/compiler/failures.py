"""The negative cache: a build that failed keeps its log, and is not repeated for ten minutes.

Eight ranks that start together would otherwise run one failing compilation eight times. Only failures that the same
inputs must repeat are remembered; a full disk or a killed compiler is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import time
from pathlib import Path

from .. import errors
from ..errors import BuildError, CompileError, SpillLimitExceeded
from ..record import Limits
from .artifact import COMMAND, LOG
from .diagnose import Place
from .request import Request
from .roots import VERSION_DIR

REMEMBERED_SECONDS = 600.0
REMEMBERED = (CompileError, SpillLimitExceeded)
_FILE = "error.json"
_PARTS = ("cause", "hint", "log", "reproduction", "first_error")


def failed_directory(root: Path, name: str) -> Path:
    """Return where the files of an entry's last failed build are kept."""
    return root / VERSION_DIR / ".failed" / name


def failed_place(root: Path, name: str) -> Place:
    """Return the log and the reproduction that an error names: valid once the failed build was kept."""
    directory = failed_directory(root, name)
    return Place(str(directory / LOG), f"sh {shlex.quote(str(directory / COMMAND))}")


def keep_failure(root: Path, name: str, request: Request, staging: Path, error: BuildError) -> None:
    """Keep a failed build's directory for the user to look at, and remember its error."""
    directory = failed_directory(root, name)
    with contextlib.suppress(OSError):
        known = {"build_key": request.build_key, "limits": repr(request.record.limits)}
        known |= {"type": type(error).__name__, "time": time.time()}
        known["parts"] = {part: getattr(error, part) for part in _PARTS}
        (staging / _FILE).write_text(json.dumps(known), encoding="utf-8")
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(directory, ignore_errors=True)
        os.rename(staging, directory)


def forget_failure(root: Path, name: str) -> None:
    """Remove what was kept of an entry's failed build, now that it has been built."""
    shutil.rmtree(failed_directory(root, name), ignore_errors=True)


def raise_remembered(root: Path, name: str, build_key: str, limits: Limits) -> None:
    """Raise the error of the same build, held to the same limits, if it failed within the last ten minutes."""
    path = failed_directory(root, name) / _FILE
    try:
        known = json.loads(path.read_bytes())
        kind, age = getattr(errors, known["type"]), time.time() - known["time"]
        parts = dict(known["parts"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return
    is_same = (known["build_key"], known.get("limits")) == (build_key, repr(limits))
    if not is_same or not issubclass(kind, REMEMBERED) or not 0 <= age < REMEMBERED_SECONDS:
        return
    parts["hint"] = f"{parts['hint']}; it failed {age:.0f} s ago and was not tried again: delete {path.parent} to retry"
    raise kind(parts.pop("cause"), **parts)
