"""Look a record up in every layer: prebuilt directories, the user cache, read-only shared caches.

Prebuilt and read-only layers match by source key and are never written. The user cache matches by build key where a
toolchain is found, else by source key.
"""

from __future__ import annotations

import contextlib
import platform
from dataclasses import dataclass, field
from pathlib import Path

from .. import config
from ..arch import Arch, get_arch
from ..codegen.render import check_arch
from ..errors import BuildError, NotPrebuilt, ToolchainNotFound, UnsupportedArch
from ..paths import manifest_path
from ..record import Record
from . import cache
from .artifact import Artifact
from .check import check_versions, machine_name
from .discover import find_toolchain
from .flags import compile_flags, extra_flags
from .key import build_key, canonical_json, source_key
from .memo import source_digest
from .progress import say
from .providers import provider_directories
from .rendering import is_current
from .roots import named_layers, user_roots
from .toolchain import Toolchain
from .usage import stamp


@dataclass
class Search:
    """One look-up: what was asked, what was found, and every place looked at with what was there."""

    record: Record
    arch: Arch
    artifact: Artifact | None = None
    source_key: str = ""
    build_key: str | None = None
    toolchain: Toolchain | None = None
    toolchain_error: BuildError | None = None
    flags: tuple[str, ...] = ()
    looked: list[str] = field(default_factory=list)

    def note(self, place: str, what: str) -> None:
        """Remember a place and what was found there."""
        self.looked.append(f"{place}: {what}")

    def not_prebuilt(self) -> NotPrebuilt:
        """Return the error of a look-up that found nothing while compiling is disabled."""
        places = "\n".join(f"  {line}" for line in self.looked)
        which = "" if self.record.shipped else f"--manifest {manifest_path(shipped=False)} "
        return NotPrebuilt(
            f"{self.record.name} for {self.arch.name} is not prebuilt and CAKE_KDA_JIT_DISABLE=1 forbids compiling; "
            f"looked at\n{places}\n"
            f"  unset CAKE_KDA_JIT_DISABLE, or run `python -m cake_kda_jit prebuild {which}--arch {self.arch.name} "
            "--out DIR` and set CAKE_KDA_JIT_PREBUILT=DIR"
        )


def find_artifact(record: Record, arch: str | Arch) -> Artifact | None:
    """Return the verified library of a record from any layer, or None. Compiles nothing.

    Raises UnsupportedArch when the record does not build for the target, RenderError when its template is broken.
    """
    return search(record, arch).artifact


def search(record: Record, arch: str | Arch) -> Search:
    """Look in every layer, in order, up to the first verified entry."""
    target = get_arch(arch)
    check_arch(record, target)
    found = Search(record, target)
    for root in named_layers("PREBUILT"):
        if _look_by_source(found, root, "prebuilt", "prebuilt directory"):
            return found
    if not config.read("PREBUILT"):
        found.note("prebuilt directories (CAKE_KDA_JIT_PREBUILT)", "none named")
    wheels = provider_directories(target.name)
    for root in wheels:
        if _look_by_source(found, root, "prebuilt", "installed wheel"):
            return found
    if not wheels:
        found.note(f"installed wheels (cake_kda_jit_prebuilt_{target.name})", "none installed")
    if _look_in_user_cache(found):
        return found
    for root in named_layers("CACHE_RO"):
        if _look_by_source(found, root, "cache", "read-only cache"):
            return found
    return found


def is_built(record: Record, arch: str) -> bool:
    """Whether any layer has an entry of today's source of a record, by its provenance alone: nothing is verified."""
    roots = [*named_layers("PREBUILT"), *provider_directories(arch), *user_roots(), *named_layers("CACHE_RO")]
    for root in roots:
        for directory in cache.candidates(root, record, arch):
            with contextlib.suppress(FileNotFoundError, cache.EntryFault):
                provenance = cache.read_provenance(directory)
                is_same = canonical_json(provenance["record"]) == canonical_json(record.description())
                if is_same and is_current(provenance["rendering"]) and _is_of_this_machine(provenance):
                    return True
    return False


def get_source_key(found: Search) -> str:
    """Return the source key of what is looked for, formed once."""
    if not found.source_key:
        digest = source_digest(found.record, found.arch.name)
        found.source_key = source_key(found.record, found.arch.name, digest)
    return found.source_key


def _look_in_user_cache(found: Search) -> bool:
    # With compiling disabled no compiler matters, so none is asked.
    if not config.read("DISABLE"):
        try:
            toolchain = find_toolchain(found.arch)
            check_versions(found.arch, toolchain)
            found.toolchain = toolchain
        except (ToolchainNotFound, UnsupportedArch) as error:
            found.toolchain_error = error
    for root in user_roots():
        if found.toolchain is None:
            why = "compiling is disabled" if found.toolchain_error is None else found.toolchain_error.cause
            hit = _look_by_source(found, root, "cache", f"user cache, matched by source ({why})", is_own=True)
        else:
            hit = look_by_build_key(found, root)
        if hit:
            return True
    return False


def get_build_key(found: Search) -> str:
    """Return the build key of what is looked for; the search must have found a toolchain."""
    if found.build_key is None:
        found.flags = compile_flags(found.record, found.arch, found.toolchain)
        found.build_key = build_key(get_source_key(found), found.flags, found.toolchain.identity, extra_flags())
    return found.build_key


def look_by_build_key(found: Search, root: Path, *, is_locked: bool = False) -> bool:
    """Look for exactly this build in a user cache; a bad entry is a miss, and moves to quarantine under the lock."""
    key = get_build_key(found)
    directory = cache.entry_directory(root, found.record, found.arch.name, key)
    try:
        artifact = cache.open_entry(
            directory, found.record, found.arch.name, origin="cache", reason=f"user cache {root}", dependencies=True
        )
        if artifact.build_key != key:
            raise cache.EntryFault("its build key is not the one of its name")
    except FileNotFoundError:
        found.note(f"user cache {root}", f"no entry {directory.name}")
        return False
    except cache.EntryFault as fault:
        found.note(f"user cache {root}", f"entry {directory.name} is unusable: {fault}")
        if is_locked:
            cache.quarantine(root, directory, fault)
        return False
    stamp(root, directory)
    return _take(found, artifact)


def _look_by_source(found: Search, root: Path, origin: str, what: str, *, is_own: bool = False) -> bool:
    place = f"{what} {root}"
    number = 0
    for directory in cache.candidates(root, found.record, found.arch.name):
        number += 1
        try:
            provenance = cache.read_provenance(directory)
            if tuple(provenance["extra_flags"]) != extra_flags():
                found.note(place, f"{directory.name} was built with other CAKE_KDA_JIT_EXTRA_FLAGS")
                continue
            if provenance["source_key"] != _source_key_beside(found, provenance):
                found.note(place, f"{directory.name} is of another source, record or target")
                continue
            if not _is_of_this_machine(provenance):
                found.note(place, f"{directory.name} is for {provenance['toolchain']['host']['target']}")
                continue
            reason = f"{what} {root}"
            artifact = cache.open_entry(
                directory, found.record, found.arch.name, origin=origin, reason=reason, dependencies=False
            )
        except FileNotFoundError:
            continue
        except cache.EntryFault as fault:
            found.note(place, f"{directory.name} is unusable: {fault}")
            continue
        if is_own:
            stamp(root, directory)
        return _take(found, artifact)
    if not number:
        found.note(place, f"no entry of {found.record.symbol} for {found.arch.name}")
    return False


def _source_key_beside(found: Search, provenance: dict) -> str:
    """Return the source key looked for; an entry that was rendered from today's templates saves rendering them."""
    inputs, record = provenance["rendering"], found.record.description()
    is_same = not found.source_key and canonical_json(provenance["record"]) == canonical_json(record)
    if is_same and is_current(inputs):
        found.source_key = source_key(found.record, found.arch.name, inputs["source_digest"])
    return get_source_key(found)


def _is_of_this_machine(provenance: dict) -> bool:
    """Whether a library's host code is of this processor's kind: a CUDA target is the same on x86-64 and on aarch64."""
    machine = provenance["toolchain"]["host"]["target"].partition("-")[0]
    return not machine or machine_name(machine) == machine_name(platform.machine())


def _take(found: Search, artifact: Artifact) -> bool:
    found.artifact = artifact
    say(f"{found.record.symbol} for {found.arch.name}: {artifact.reason}", verbose=True)
    return True
