"""Wheels of prebuilt kernels: how they are found, and how they are made.

A provider is an installed distribution with an entry point in the group ``cake_kda_jit.prebuilt``: its name is a
target, its value a module whose directory has the format of a cache. What it holds is matched by source key, never by
a version string, and verified like every entry.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import LoadError
from .artifact import PROVENANCE, REPORT
from .roots import VERSION_DIR

GROUP = "cake_kda_jit.prebuilt"
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # the same bytes whenever the wheel is made
_LICENSE = "Apache-2.0"


@dataclass(frozen=True)
class Provider:
    """An installed wheel of prebuilt kernels: its distribution, its target, and its directory."""

    distribution: str
    arch: str
    directory: Path


@cache
def find_providers() -> tuple[Provider, ...]:
    """Return the installed wheels of prebuilt kernels, looked for once in a process; nothing of them is imported."""
    # torch has imported this module already; a process without torch has no hit to be quick about.
    from importlib.metadata import entry_points

    found = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        path = point.dist.locate_file(point.module.replace(".", "/")) if point.dist else None
        if path is None:
            raise LoadError(f"the entry point {point.name} of {GROUP} belongs to no distribution; reinstall it")
        found.append(Provider(point.dist.name, point.name, Path(str(path)).absolute()))
    return tuple(found)


def provider_directories(arch: str) -> list[Path]:
    """Return the directories of the installed wheels for a target."""
    return [provider.directory for provider in find_providers() if provider.arch == arch]


def write_wheel(entries: Path, arch: str, out_dir: Path, version: str) -> Path:
    """Pack the entries of one target in a prebuilt directory into a wheel; returns its path.

    Equal libraries give equal bytes: times, host names and paths of the building machine are left out.
    """
    package = f"cake_kda_jit_prebuilt_{arch}"
    tag = f"py3-none-linux_{platform.machine()}"
    info = f"{package}-{version}.dist-info"
    files = {
        f"{package}/__init__.py": f'"""Kernels of cake_kda_jit for {arch}."""\n'.encode(),
        **{f"{package}/{name}": content for name, content in _entry_files(entries, arch)},
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
            f"Summary: Kernels of cake_kda_jit, compiled for {arch}\nLicense: {_LICENSE}\n"
        ).encode(),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: cake_kda_jit\nRoot-Is-Purelib: false\nTag: {tag}\n"
        ).encode(),
        f"{info}/entry_points.txt": f"[{GROUP}]\n{arch} = {package}\n".encode(),
    }
    record = "".join(f"{name},sha256={_record_digest(files[name])},{len(files[name])}\n" for name in sorted(files))
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / f"{package}-{version}-{tag}.whl"
    temporary = path.with_name(path.name + ".part")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in files.items():
            member = zipfile.ZipInfo(name, _TIMESTAMP)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            wheel.writestr(member, content)
    temporary.replace(path)
    return path


def _entry_files(entries: Path, arch: str) -> Iterator[tuple[str, bytes]]:
    """Yield what a wheel carries of each entry: library, source, provenance and report."""
    for path in sorted((entries / VERSION_DIR / arch).glob("*/*")):
        name = str(path.relative_to(entries))
        if path.name == PROVENANCE:
            yield name, _without(path, "built")
        elif path.name == REPORT:
            yield name, _without(path, "seconds")
        elif path.suffix in (".so", ".cu", ".cpp"):
            yield name, path.read_bytes()


def _without(path: Path, key: str) -> bytes:
    value = json.loads(path.read_bytes())
    value.pop(key, None)
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _record_digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
