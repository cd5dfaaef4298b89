"""Build a record: look it up, else compile it once, however many processes ask.

key -> look up -> lock -> look up again -> private staging directory -> ninja -> validate -> describe -> rename.
"""

from __future__ import annotations

import errno
import shlex
import shutil
import tempfile
import time
import warnings
from pathlib import Path

from .. import config
from ..arch import Arch
from ..codegen.render import render
from ..errors import BuildError, DiskFull, RenderError
from ..record import Record
from . import cache, failures, lookup, ninja, publish
from .artifact import Artifact, library_name
from .diagnose import failure
from .flags import check_target, command_line, extra_flags
from .key import source_key
from .lock import build_lock
from .progress import say, step
from .request import Request
from .roots import VERSION_DIR, get_writable_root
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
    check_target(found.arch, found.toolchain)
    root = get_writable_root()
    name = cache.entry_name(found.record, lookup.get_build_key(found))
    try:
        with build_lock(root, name):
            if lookup.look_by_build_key(found, root, is_locked=True):
                return found.artifact
            failures.raise_remembered(root, name, found.build_key)
            return _compile(root, name, _request(found))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(
            f"the disk of the kernel cache {root} is full ({error.strerror})",
            hint="free space, or set CAKE_KDA_JIT_CACHE_DIR to another file system",
        ) from error


def _request(found: lookup.Search) -> Request:
    source = render(found.record, found.arch)
    if source_key(found.record, found.arch.name, source.digest) != found.source_key:
        raise RenderError(f"the templates of {found.record.name} changed during its build", hint="call again")
    return Request(
        found.record, found.arch, source, found.toolchain, found.flags, extra_flags(), found.source_key, found.build_key
    )


def _compile(root: Path, name: str, request: Request) -> Artifact:
    staging = _make_staging(root, name)
    place = failures.failed_place(root, name)
    try:
        _prepare(request, staging)
        began = time.monotonic()
        with step(f"compiling {request.record.symbol} for {request.arch.name}"):
            log = _run(request, staging, place)
            library = publish.validate(request, staging, place)
        publish.describe(request, staging, library, log, round(time.monotonic() - began, 3), place)
    except BaseException as error:
        if isinstance(error, BuildError):
            failures.keep_failure(root, name, request.build_key, staging, error)
        shutil.rmtree(staging, ignore_errors=True)
        raise
    artifact = publish.publish(root, request, staging)
    if artifact.directory != staging:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(failures.failed_directory(root, name), ignore_errors=True)
    return artifact


def _make_staging(root: Path, name: str) -> Path:
    parent = root / VERSION_DIR / ".staging"
    parent.mkdir(parents=True, exist_ok=True)
    # mkdtemp makes it private; an entry is readable to whom the umask of the cache's own directory allows.
    staging = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=parent))
    staging.chmod(parent.stat().st_mode & 0o777)
    return staging


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
        limit = config.read("COMPILE_TIMEOUT")
        raise failure(request.record, request.arch, outcome.status, outcome.log, place, limit)
    return outcome.log
