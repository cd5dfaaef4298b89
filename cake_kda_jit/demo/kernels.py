"""Which kernels ran, and where they came from: the part of the demo that shows the compiler at work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..compiler import progress
from ..runtime.load import Kernel, loaded_kernels

KernelOrigins = dict[str, tuple[str, str, str]]
"""Per kernel its family, its target and its origin: built, cache or prebuilt."""


@contextmanager
def announced_loading(say: Callable[[str], None]) -> Iterator[None]:
    """Say each kernel that is loaded meanwhile, as it comes, and how long it took."""
    say("kernels: a first start compiles them, later ones find them in the cache")
    if progress.is_visible():
        yield  # on a terminal the compiler itself says what it is doing
        return
    finished = threading.Event()
    watcher = threading.Thread(target=_watch, args=(say, finished), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def kernels_used() -> tuple[KernelOrigins, list[str]]:
    """Return the kernels loaded in this process by name, sorted, and the folders that hold their libraries."""
    kernels = sorted(loaded_kernels(), key=_name)
    folders = sorted({str(kernel.artifact.directory.parent) for kernel in kernels})
    return {_name(k): (k.record.family, k.arch, k.origin) for k in kernels}, folders


def kernels_line(kernels: KernelOrigins, folders: list[str]) -> str:
    """Return ``kernels: NAME (family, target, origin), ...; cache: FOLDER``."""
    shown = ", ".join(f"{name} ({', '.join(facts)})" for name, facts in kernels.items())
    return f"kernels: {shown}; cache: {', '.join(folders)}"


def _name(kernel: Kernel) -> str:
    return kernel.record.symbol


def _watch(say: Callable[[str], None], finished: threading.Event) -> None:
    said, since = len(loaded_kernels()), time.monotonic()
    while True:
        is_last = finished.wait(0.1)
        for kernel in loaded_kernels()[said:]:
            now = time.monotonic()
            say(f"  {_name(kernel)}: {kernel.origin}, {now - since:.1f} s")
            said, since = said + 1, now
        if is_last:
            return
