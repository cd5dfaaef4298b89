"""Why a kernel would be compiled: which field of its key differs from the nearest entry in any layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..arch import Arch
from ..errors import BuildError
from ..record import Record
from . import cache, lookup
from .check import check_versions
from .discover import find_toolchain
from .flags import compile_flags, extra_flags
from .key import canonical_json, source_key
from .providers import provider_directories
from .rendering import render_for_build
from .roots import named_layers, user_roots


@dataclass(frozen=True)
class Difference:
    """One field of the key: what an entry was built with, and what a build now would use."""

    field: str
    entry: Any
    now: Any


@dataclass(frozen=True)
class Neighbour:
    """An entry of the same record and target name, and how its key differs from today's."""

    directory: Path
    layer: str
    differences: tuple[Difference, ...]
    fault: str | None = None


@dataclass(frozen=True)
class Explanation:
    """What a look-up of a record says: its keys, what it would use and why, and the entries near it, nearest first.

    ``build_key`` is None without a usable toolchain, which ``toolchain_error`` explains.
    """

    source_key: str
    build_key: str | None
    toolchain_error: BuildError | None
    hit: str | None
    looked: tuple[str, ...]
    neighbours: tuple[Neighbour, ...]


def explain(record: Record, arch: Arch) -> Explanation:
    """Explain what a build of a record for a target would do now. Compiles nothing."""
    search = lookup.search(record, arch)
    facts, build_key, error = _facts(record, arch)
    neighbours = []
    for layer, root in _layers(arch):
        for directory in cache.candidates(root, record, arch.name):
            neighbours.append(_compare(layer, directory, facts))
    neighbours.sort(key=lambda n: (n.fault is not None, len(n.differences)))
    hit = None
    if search.artifact is not None:
        hit = f"{search.artifact.directory} ({search.artifact.reason})"
    return Explanation(facts["source_key"], build_key, error, hit, tuple(search.looked), tuple(neighbours))


def _layers(arch: Arch) -> Iterator[tuple[str, Path]]:
    yield from (("prebuilt directory", root) for root in named_layers("PREBUILT"))
    yield from (("installed wheel", root) for root in provider_directories(arch.name))
    yield from (("user cache", root) for root in user_roots())
    yield from (("read-only cache", root) for root in named_layers("CACHE_RO"))


def _facts(record: Record, arch: Arch) -> tuple[dict[str, Any], str | None, BuildError | None]:
    """Return the fields of today's keys in the shape of a provenance, the build key, and what forbids one."""
    source, inputs = render_for_build(record, arch)
    facts = {
        "source_key": source_key(record, arch.name, source.digest),
        "record": record.description(),
        "templates": inputs["templates"],
        "source": source.digest,
        "extra_flags": list(extra_flags()),
    }
    try:
        toolchain = find_toolchain(arch)
        check_versions(arch, toolchain)
    except BuildError as error:
        return facts, None, error
    facts["flags"] = list(compile_flags(record, arch, toolchain))
    facts["toolchain"] = toolchain.identity
    search = lookup.Search(record, arch, source_key=facts["source_key"], toolchain=toolchain)
    return facts, lookup.get_build_key(search), None


def _compare(layer: str, directory: Path, facts: dict[str, Any]) -> Neighbour:
    try:
        provenance = cache.read_provenance(directory)
        size, sha256 = provenance["library"]["size"], provenance["library"]["sha256"]
        cache.check_library(directory / provenance["library"]["name"], size, sha256)
        # Prebuilt layers match by source key: neither compilers nor headers count there.
        if layer == "user cache":
            cache.check_dependencies(directory, provenance)
    except FileNotFoundError:
        return Neighbour(directory, layer, (), "it has just been removed")
    except cache.EntryFault as fault:
        return Neighbour(directory, layer, (), str(fault))
    entry = {
        "record": provenance["record"],
        "templates": provenance["rendering"]["templates"],
        "source": provenance["rendering"]["source_digest"],
        "extra_flags": provenance["extra_flags"],
        **({name: provenance[name] for name in ("flags", "toolchain") if name in facts and layer == "user cache"}),
    }
    return Neighbour(directory, layer, tuple(_differences("", entry, {name: facts[name] for name in entry})))


def _differences(path: str, entry: Any, now: Any) -> Iterator[Difference]:
    if isinstance(entry, dict) and isinstance(now, dict):
        for name in sorted(entry.keys() | now.keys()):
            yield from _differences(f"{path}.{name}" if path else name, entry.get(name), now.get(name))
    elif canonical_json(entry) != canonical_json(now):
        if path in ("flags", "extra_flags"):
            only_entry = [flag for flag in entry if flag not in now]
            only_now = [flag for flag in now if flag not in entry]
            yield Difference(path, only_entry or list(entry), only_now or list(now))
        else:
            yield Difference(path, entry, now)
