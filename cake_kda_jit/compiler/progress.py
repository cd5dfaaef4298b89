"""What a user sees while kernels are looked up and built: lines on standard error."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from .. import config

PATIENCE_SECONDS = 5.0
"""A step or a wait that takes longer is told in the log of a job too, which no terminal watches."""

_lock = threading.Lock()
_open_line: str | None = None  # a line that waits for its end, while nothing else was printed


def is_visible(*, verbose: bool = False) -> bool:
    """Whether a line is printed: on a terminal or with CAKE_KDA_JIT_VERBOSE=1; ``verbose`` ones only with that."""
    return config.read("VERBOSE") or (not verbose and sys.stderr is not None and sys.stderr.isatty())


def say(line: str, *, verbose: bool = False, always: bool = False) -> None:
    """Print one line of progress if anybody watches; ``always`` also into the log of a job that nobody watches."""
    if is_visible(verbose=verbose) or (always and sys.stderr is not None):
        with _lock:
            _end_open_line()
            print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Show ``what ...`` at the begin and the seconds taken at the end, on one line unless others printed meanwhile."""
    global _open_line
    began = time.monotonic()
    visible = is_visible()
    if visible:
        with _lock:
            _end_open_line()
            print(f"{what} ...", end="", file=sys.stderr, flush=True)
            _open_line = what
    outcome = "failed after "
    reminder = threading.Timer(PATIENCE_SECONDS, _remind, (what, began))
    reminder.daemon = True
    if not visible:
        reminder.start()
    try:
        yield
        outcome = ""
    finally:
        reminder.cancel()
        if visible:
            with _lock:
                begin = "" if _open_line == what else f"{what} ..."
                if begin:
                    _end_open_line()
                print(f"{begin} {outcome}{time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
                _open_line = None


def _remind(what: str, began: float) -> None:
    say(f"{what}: {time.monotonic() - began:.0f} s so far", always=True)


def _end_open_line() -> None:
    global _open_line
    if _open_line is not None:
        print(file=sys.stderr)
        _open_line = None


def _reset_after_fork() -> None:
    # A fork while another thread prints would leave the child a lock that nobody releases.
    global _lock, _open_line
    _lock, _open_line = threading.Lock(), None


os.register_at_fork(after_in_child=_reset_after_fork)
