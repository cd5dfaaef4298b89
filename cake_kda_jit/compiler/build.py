"""Build a record: look it up, else compile it once, however many processes ask.

key -> look up -> lock -> look up again -> private staging directory -> ninja -> validate -> describe -> rename.
"""

from __future__ import annotations

import errno
import shlex
import shutil
import time
import warnings
from pathlib import Path

from .. import config
from ..arch import Arch
from ..errors import BuildError, CacheNotWritable, DiskFull, RenderError
from ..record import Record
from . import cache, failures, gc, lookup, ninja, publish
from .artifact import Artifact, library_name
from .check import check_target
from .diagnose import failure
from .flags import command_line, extra_flags
from .key import source_key
from .lock import build_lock
from .progress import say, step
from .rendering import render_for_build
from .request import Request
from .roots import get_writable_root
from .staging import staging_directory
from .toolchain import NVCC_FLAG_VARIABLES


def build(record: Record, arch: str | Arch) -> Artifact:
    """Return the verified library of a record for a target, compiling it if no layer has it.

    Raises NotPrebuilt with the places looked at when compiling is disabled, else a BuildError: its type says what went
    wrong; it carries cause, hint, log and a reproduction.
    """
    found = lookup.search(record, arch)
    if found.artifact is not None:
        return found.artifact
    if config.read("DISABLE"):
        raise found.not_prebuilt()
    return compile_into_cache(found)


def compile_into_cache(found: lookup.Search) -> Artifact:
    """Compile what a look-up did not find, into the user cache; one process compiles, the others wait and load."""
    if found.toolchain is None:
        raise found.toolchain_error
    check_target(found.arch, found.toolchain, extra_flags())
    config.read("CACHE_MAX_BYTES")  # is needed after the build: a malformed one is refused before it
    root = get_writable_root()
    name = cache.entry_name(found.record, lookup.get_build_key(found))
    try:
        with build_lock(root, name):
            if lookup.look_by_build_key(found, root, is_locked=True):
                return found.artifact
            failures.raise_remembered(root, name, found.build_key, found.record.limits)
            return _compile(root, name, _request(found))
    except OSError as error:
        typed = _typed(error, root)
        if typed is None:
            raise
        raise typed from error


def _typed(error: OSError, root: Path) -> BuildError | None:
    """Return what a failure of the cache's file system is, or None."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"the disk of the kernel cache {root} is full ({error.strerror})",
            hint="free space, or set CAKE_KDA_JIT_CACHE_DIR to another file system",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return CacheNotWritable(
            f"a part of the kernel cache {root} cannot be written: {error.strerror}: {error.filename}",
            hint="does another user own it? Set CAKE_KDA_JIT_CACHE_DIR to a directory of your own",
        )
    return None


def _request(found: lookup.Search) -> Request:
    source, rendering = render_for_build(found.record, found.arch)
    if source_key(found.record, found.arch.name, source.digest) != found.source_key:
        raise RenderError(f"the templates of {found.record.name} changed during its build", hint="call again")
    keys = found.source_key, found.build_key
    return Request(found.record, found.arch, source, rendering, found.toolchain, found.flags, extra_flags(), *keys)


def _compile(root: Path, name: str, request: Request) -> Artifact:
    place = failures.failed_place(root, name)
    with staging_directory(root, name) as staging:
        try:
            artifact = _compile_in(staging.directory, root, request, place)
        except BuildError as error:
            failures.keep_failure(root, name, request, staging.directory, error)
            raise
        if artifact.directory == staging.directory:
            staging.keep()
        else:
            failures.forget_failure(root, name)
    gc.collect_quietly(root)
    return artifact


def _compile_in(staging: Path, root: Path, request: Request, place: failures.Place) -> Artifact:
    _prepare(request, staging)
    began = time.monotonic()
    with step(f"compiling {request.record.symbol} for {request.arch.name}"):
        log = _run(request, staging, place)
        library = publish.validate(request, staging, place)
    publish.describe(request, staging, library, log, round(time.monotonic() - began, 3), place)
    return publish.publish(root, request, staging)


def _prepare(request: Request, staging: Path) -> None:
    """Write the source and the build file."""
    source, record = request.source, request.record
    (staging / source.filename).write_text(source.text, encoding="utf-8")
    command = command_line(request, str(staging))
    ninja.write_build_file(staging, command, source.filename, library_name(record))
    ignored = config.foreign(NVCC_FLAG_VARIABLES)
    if request.arch.is_cuda and ignored:
        names = ", ".join(f"{name}={value}" for name, value in ignored.items())
        warnings.warn(f"{names} is ignored; use CAKE_KDA_JIT_EXTRA_FLAGS, which is part of the key", stacklevel=2)
    say(shlex.join(command), verbose=True)


def _run(request: Request, staging: Path, place: failures.Place) -> str:
    """Compile and return the log; raises the typed error of a failure."""
    outcome = ninja.run_ninja(staging)
    if outcome.status != 0:
        raise failure(
            request.record,
            request.arch,
            outcome.status,
            outcome.log,
            place,
            seconds=config.read("COMPILE_TIMEOUT"),
            free_bytes=shutil.disk_usage(staging).free,
        )
    return outcome.log
