"""``build.json`` and ``build.test.json``: every record with the digest that its source has for each target.

They are written from the registry, never by hand; a test holds them to it. A changed digest in a diff shows which
kernels a change of templates touches. ``prebuild`` fills a directory with the libraries of a manifest: what a machine
without a compiler is given.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import config
from ..arch import Arch, get_arch
from ..catalog import registry
from ..codegen.render import check_arch, render
from ..errors import BuildError, ConfigError, UnsupportedArch
from ..paths import PACKAGE_DIR, manifest_path
from ..record import Record
from . import lookup
from .artifact import Artifact
from .build import compile_into_cache
from .cache import EntryFault, entry_directory, open_entry
from .discover import find_toolchain
from .jobs import num_jobs
from .ninja import stop_all
from .progress import say
from .providers import write_wheel
from .roots import user_roots

MANIFEST_SCHEMA = 1


def make_manifest(*, shipped: bool) -> dict[str, Any]:
    """Return the manifest of the shipped or of the test-only records, rendering each for each of its targets."""
    records = registry().shipped() if shipped else registry().test_only()
    return {"schema": MANIFEST_SCHEMA, "shipped": shipped, "records": [_row(record) for record in records]}


def _row(record: Record) -> dict[str, Any]:
    description = record.description()
    row = {name: description[name] for name in ("program", "variant", "family", "params", "build_keywords")}
    row["targets"] = {arch: render(record, arch).digest for arch in sorted(record.archs)}
    return row


def manifest_text(*, shipped: bool) -> str:
    """Return the text of a manifest file."""
    return json.dumps(make_manifest(shipped=shipped), indent=2, sort_keys=True) + "\n"


def write_manifests() -> list[Path]:
    """Write both manifests; returns the paths of those that changed.

    Raises ConfigError in an installed package: its manifests came with its templates.
    """
    place = manifest_path(shipped=True).parent
    if place.is_relative_to(PACKAGE_DIR):
        raise ConfigError(f"the manifests in {place} belong to an installed package; write those of a checkout")
    outdated = _outdated()
    for path, text in outdated:
        path.write_text(text, encoding="utf-8")
    return [path for path, _ in outdated]


def outdated_manifests() -> list[Path]:
    """Return the manifests that differ from the registry."""
    return [path for path, _ in _outdated()]


def _outdated() -> list[tuple[Path, str]]:
    result = []
    for shipped in (True, False):
        path, text = manifest_path(shipped=shipped), manifest_text(shipped=shipped)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            result.append((path, text))
    return result


def read_manifest(path: Path) -> list[Record]:
    """Return the records that a manifest names, from the registry.

    Raises ConfigError when the file is no manifest or names a record that the registry does not have.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["schema"] != MANIFEST_SCHEMA:
            raise ConfigError(f"{path} has schema {manifest['schema']}; accepted: {MANIFEST_SCHEMA}")
        names = [(row["program"], row["variant"], row["family"]) for row in manifest["records"]]
        return [registry().get(*name) for name in names]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a manifest of this version: {error}; run `manifest --write`") from None


@dataclass(frozen=True)
class Prebuilt:
    """What became of one record for one target: ``directory``, or the ``error`` that refused or failed it.

    ``is_skipped``: the record does not build for the target, which is said but is no failure. Compilers that do not
    know a target that was asked for are one.
    """

    record: Record
    arch: str
    directory: Path | None = None
    error: BuildError | None = None
    origin: str = ""
    is_skipped: bool = False

    @property
    def verdict(self) -> str:
        """What became of it, in a few words: built, cache, skipped or failed and why."""
        if self.error is None:
            return self.origin
        return f"{'skipped' if self.is_skipped else 'failed'}, {self.error.cause}"

    @property
    def is_failed(self) -> bool:
        """Whether compiling failed."""
        return self.error is not None and not self.is_skipped


def prebuild(
    manifest: str | Path,
    archs: Sequence[str | Arch],
    out_dir: str | Path,
    *,
    jobs: int | None = None,
    keep_going: bool = False,
) -> list[Prebuilt]:
    """Build every record of a manifest for the targets into ``out_dir``, in the format of a cache.

    ``out_dir`` is then used through ``CAKE_KDA_JIT_PREBUILT``, also where no compiler is. A failure stands in its
    Prebuilt; after one nothing more is begun, unless ``keep_going``, and what was not begun is not in the result.
    Raises ConfigError for a manifest that does not fit the registry.
    """
    if config.read("DISABLE"):
        raise ConfigError("CAKE_KDA_JIT_DISABLE=1 forbids compiling, and so prebuilding; unset it")
    out_dir = Path(out_dir).absolute()
    records, targets = read_manifest(Path(manifest)), [get_arch(arch) for arch in archs]
    pairs = [(record, arch) for arch in targets for record in records if record.family in arch.families]
    numbers = itertools.count(1)
    with ThreadPoolExecutor(num_jobs(jobs)) as pool:
        waiting = [pool.submit(_prebuild_one, record, arch, out_dir) for record, arch in pairs]
        try:
            for one in as_completed(waiting):
                result = one.result()
                say(f"[{next(numbers)}/{len(pairs)}] {result.record.symbol} for {result.arch}: {result.verdict}")
                if result.is_failed and not keep_going:
                    for other in waiting:
                        other.cancel()
                    break
        except BaseException:
            for one in waiting:
                one.cancel()
            while wait(waiting, timeout=0.05).not_done:
                stop_all()  # again and again: one may just be about to start
            raise
    return [one.result() for one in waiting if not one.cancelled()]


def prebuild_wheels(
    archs: Sequence[str | Arch], out_dir: str | Path, version: str, **options: Any
) -> tuple[list[Prebuilt], list[Path]]:
    """Build the shipped records for the targets and pack one wheel a target into ``out_dir``.

    Returns what became of each record, and the wheels: none for a target of which a record failed or none was built.
    ``options`` are those of ``prebuild``. Test-only records are in no wheel.
    """
    wheels = []
    with tempfile.TemporaryDirectory(prefix="cake_kda_jit-wheel-") as directory:
        results = prebuild(manifest_path(shipped=True), archs, directory, **options)
        for arch in dict.fromkeys(get_arch(arch).name for arch in archs):
            own = [one for one in results if one.arch == arch]
            if any(one.directory for one in own) and not any(one.is_failed for one in own):
                wheels.append(write_wheel(Path(directory), arch, Path(out_dir), version))
    return results, wheels


def _prebuild_one(record: Record, arch: Arch, out_dir: Path) -> Prebuilt:
    try:
        check_arch(record, arch)
    except UnsupportedArch as error:
        return Prebuilt(record, arch.name, error=error, is_skipped=True)
    try:
        artifact = _get_build(record, arch)
    except BuildError as error:
        return Prebuilt(record, arch.name, error=error)
    return Prebuilt(record, arch.name, _copy(artifact, out_dir), origin=artifact.origin)


def _get_build(record: Record, arch: Arch) -> Artifact:
    """Return exactly this toolchain's build: prebuilt and shared layers, which match by source, are not asked."""
    found = lookup.Search(record, arch, toolchain=find_toolchain(arch))
    if any(lookup.look_by_build_key(found, root) for root in user_roots()):
        return found.artifact
    return compile_into_cache(found)


def _copy(artifact: Artifact, out_dir: Path) -> Path:
    final = entry_directory(out_dir, artifact.record, artifact.arch, artifact.build_key)
    with contextlib.suppress(FileNotFoundError, EntryFault):
        present = open_entry(final, artifact.record, artifact.arch, origin="prebuilt", reason="", dependencies=False)
        if present.build_key == artifact.build_key and present.sha256 == artifact.sha256:
            return final
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        shutil.copytree(artifact.directory, staging, dirs_exist_ok=True)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return final
