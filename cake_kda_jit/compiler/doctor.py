"""Test a machine for what the compiler needs: each check runs what a build would run, and says what to do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import config, paths
from ..arch import ARCHES, CUDA_ARCHES, Arch, host_arch
from ..errors import BuildError, ConfigError
from . import flock
from .check import check_host_limit, check_parts, check_target
from .discover import INSTALL_COMMAND, NvccPlace, all_nvccs, find_host_compiler, knows
from .flags import extra_flags
from .gc import list_entries
from .jobs import available_cores, available_memory, num_jobs
from .lock import held_locks, locks_directory
from .ninja import find_ninja
from .probe import probe_host, probe_nvcc
from .providers import find_providers
from .roots import get_writable_root, named_layers, user_roots
from .toolchain import NVCC_FLAG_VARIABLES, SCRUBBED, Tool, Toolchain, run_tool

OK, WARN, FAIL = "ok", "warning", "broken"
_LOW_DISK = 1 << 30
_SILENT_SECONDS = 30.0


@dataclass(frozen=True)
class Finding:
    """One check: ``status`` is ok, warning or broken; ``says`` what was found; ``do`` what to do about it."""

    check: str
    status: str
    says: str
    do: str = ""

    def as_json(self) -> dict[str, str]:
        """Return it as plain JSON values."""
        return asdict(self)


def examine(device_arch: str | None = None) -> Iterator[Finding]:
    """Yield the findings one by one, as they come; ``device_arch`` is the target of this machine's GPU, if it has one.

    A missing nvcc is broken only where a GPU needs it and no prebuilt kernels stand in.
    """
    settings = list(_settings())
    yield from settings
    if any(finding.status == FAIL for finding in settings):
        return  # what depends on a malformed value cannot be examined
    yield from _templates()
    yield from _prebuilt()
    try:
        host = find_host_compiler()
    except BuildError as error:
        host = None
        status = WARN if _is_prebuilt(host_arch().name) else FAIL
        yield Finding("host compiler", status, error.cause, error.hint)
    if host is not None:
        yield from _host(host)
        yield from _nvccs(host, device_arch)
    yield _ninja()
    yield from _cache()
    yield Finding(
        "jobs",
        OK,
        f"{num_jobs()} compilations at a time ({available_cores()} cores, {available_memory() >> 20} MiB of memory)",
    )


def _settings() -> Iterator[Finding]:
    malformed = False
    for knob in config.KNOBS:
        try:
            config.read(knob.name)
        except ConfigError as error:
            malformed = True
            yield Finding("environment", FAIL, str(error), f"unset {knob.name} or give it an accepted value")
    if malformed:
        return
    for name, value in config.foreign(SCRUBBED).items():
        why = "nvcc's code would change without a trace" if name in NVCC_FLAG_VARIABLES else "compilers do not see it"
        yield Finding("environment", WARN, f"{name}={value} is ignored: {why}", "use CAKE_KDA_JIT_EXTRA_FLAGS instead")
    for name in ("PREBUILT", "CACHE_RO"):
        for directory in named_layers(name):
            if not directory.is_dir():
                says = f"{config.knob(name).name} names {directory}, which is no directory"
                yield Finding("environment", WARN, says, "correct or unset it")
    if config.read("DISABLE"):
        yield Finding("environment", OK, "CAKE_KDA_JIT_DISABLE=1: nothing is compiled on this machine")


def _templates() -> Iterator[Finding]:
    missing = [str(path) for path in (paths.templates_dir(), paths.manifest_path(shipped=True)) if not path.exists()]
    if missing:
        yield Finding("templates", FAIL, f"missing: {', '.join(missing)}", "reinstall cake_kda_jit")
    else:
        yield Finding("templates", OK, str(paths.templates_dir()))


def _prebuilt() -> Iterator[Finding]:
    for provider in find_providers():
        number = len(list_entries(provider.directory))
        status = OK if number else FAIL
        says = f"{provider.distribution}: {number} kernels for {provider.arch} in {provider.directory}"
        yield Finding("prebuilt", status, says, "" if number else "reinstall the wheel")
    for directory in named_layers("PREBUILT"):
        entries = list_entries(directory)
        archs = ", ".join(sorted({entry.arch for entry in entries})) or "no target"
        yield Finding("prebuilt", OK, f"{directory}: {len(entries)} kernels for {archs}")


def _is_prebuilt(arch: str) -> bool:
    roots = named_layers("PREBUILT")
    roots += [provider.directory for provider in find_providers() if provider.arch == arch]
    return any(entry.arch == arch for root in roots for entry in list_entries(root))


def _host(host: Tool) -> Iterator[Finding]:
    says = f"{host.path}: {host.identity['version']} for {host.identity['target']}"
    toolchain = Toolchain(host)
    try:
        check_target(host_arch(), toolchain)
    except BuildError as error:
        yield Finding("host compiler", FAIL, f"{says}; {error.cause}", error.hint)
        return
    yield Finding("host compiler", OK, f"{says}; it knows {host_arch().name}")
    fault = probe_host(toolchain)
    if fault is None:
        yield Finding("host link probe", OK, "a threaded C++ library compiles and links")
    else:
        yield Finding("host link probe", FAIL, fault, "install g++ with its standard library, or set CAKE_KDA_JIT_CXX")


def _nvccs(host: Tool, device_arch: str | None) -> Iterator[Finding]:
    found = all_nvccs(host)
    used = next((tool or error for _, tool, error in found if tool or error), None)
    if used is None:
        looked = ", ".join(place.reason for place, _, _ in found)
        needed = device_arch is not None and not _is_prebuilt(device_arch)
        yield Finding(
            "nvcc",
            FAIL if needed else WARN,
            f"none found (looked at {looked}); " + ("this GPU needs it" if needed else "CUDA kernels are not compiled"),
            f"`{INSTALL_COMMAND}`, or install a CUDA toolkit, or use prebuilt kernels",
        )
        return
    for place, tool, error in found:
        if error is not None:
            yield Finding("nvcc", FAIL if error is used else WARN, f"{place.reason}: {error.cause}", error.hint)
        elif tool is not None:
            yield from _nvcc(place, Toolchain(host, tool), is_used=tool is used)
    if isinstance(used, Tool) and device_arch is not None and not knows(used, ARCHES[device_arch]):
        yield Finding(
            "device",
            WARN if _is_prebuilt(device_arch) else FAIL,
            f"this GPU is {device_arch}, which nvcc {used.identity['version']} does not know",
            f"`{INSTALL_COMMAND}`, and name its nvcc in CAKE_KDA_JIT_NVCC",
        )


def _nvcc(place: NvccPlace, toolchain: Toolchain, *, is_used: bool) -> Iterator[Finding]:
    nvcc = toolchain.nvcc
    check = "nvcc" if is_used else "nvcc (not used)"
    bad = FAIL if is_used else WARN
    yield Finding(check, OK, f"{nvcc.identity['version']} at {nvcc.path}, found by {place.reason}")
    for test in (lambda: check_parts(nvcc), lambda: check_host_limit(toolchain, extra_flags())):
        try:
            test()
        except BuildError as error:
            yield Finding(f"{check} match", bad, error.cause, error.hint)
            return
    if not is_used:
        return
    fault = probe_nvcc(toolchain)
    if fault is not None:
        yield Finding("nvcc link probe", FAIL, fault, f"reinstall the toolkit, or `{INSTALL_COMMAND}`")
        return
    yield Finding("nvcc link probe", OK, "a library with the bf16 headers and the static CUDA runtime links")
    known, unknown = arch_matrix(nvcc)
    says = f"knows {' '.join(known)}" + (f"; does not know {' '.join(unknown)}" if unknown else "")
    yield Finding("nvcc targets", OK, says, f"for those: `{INSTALL_COMMAND}`" if unknown else "")


def arch_matrix(nvcc: Tool) -> tuple[list[str], list[str]]:
    """Return the CUDA targets that an nvcc knows and those that it does not."""
    known = [name for name in CUDA_ARCHES if knows(nvcc, ARCHES[name])]
    return known, [name for name in CUDA_ARCHES if name not in known]


def _ninja() -> Finding:
    try:
        path = find_ninja()
    except BuildError as error:
        return Finding("ninja", FAIL, error.cause, error.hint)
    status, out, err = run_tool([path, "--version"])
    if status:
        return Finding("ninja", FAIL, f"{path} does not run: {(err or out).strip()}", "pip install --force ninja")
    return Finding("ninja", OK, f"{out.strip()} at {path}")


def _cache() -> Iterator[Finding]:
    if config.read("DISABLE"):
        roots = ", ".join(map(str, user_roots()))
        yield Finding("cache", OK, f"{roots}: read only, because compiling is disabled")
        return
    try:
        root = get_writable_root()
    except BuildError as error:
        yield Finding("cache", FAIL, error.cause, error.hint)
        return
    size, limit = sum(entry.num_bytes for entry in list_entries(root)), config.read("CACHE_MAX_BYTES")
    number = len(list_entries(root))
    yield Finding("cache", OK, f"{root} is writable; {number} kernels, {size >> 20} of at most {limit >> 20} MiB")
    free = shutil.disk_usage(root).free
    is_low = free < _LOW_DISK
    do = "free space, or set CAKE_KDA_JIT_CACHE_DIR" if is_low else ""
    yield Finding("disk", WARN if is_low else OK, f"{free >> 20} MiB are free at {root}", do)
    if os.statvfs(root).f_flag & os.ST_NOEXEC:
        do = "set CAKE_KDA_JIT_CACHE_DIR to a file system that is mounted without noexec"
        yield Finding("cache mount", FAIL, f"{root} is mounted noexec: no library there can be loaded", do)
    yield _locks(root)
    yield from _builds(root)


def _locks(root: Path) -> Finding:
    path = locks_directory(root) / f"doctor-{os.getpid()}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = flock.lock_file(path)
        path.unlink()
        flock.release(handle)
    except OSError as error:
        return Finding(
            "locks",
            WARN,
            f"{path.parent} cannot be locked ({error.strerror}): processes may compile one kernel twice",
            "set CAKE_KDA_JIT_CACHE_DIR to a local file system",
        )
    return Finding("locks", OK, "the cache's file system can lock")


def _builds(root: Path) -> Iterator[Finding]:
    """Tell which build locks are held, by whom and since when."""
    held = held_locks(root)
    if not held:
        yield Finding("builds", OK, "no process is building here")
    for one in held:
        if one.silent_seconds is None or one.silent_seconds > _SILENT_SECONDS:
            silent = "" if one.silent_seconds is None else f", without a sign of life for {one.silent_seconds:.0f} s"
            do = f"if that process hangs, end it; the lock is {one.path}"
            yield Finding("builds", WARN, f"{one.name} is held by {one.holder}{silent}", do)
        else:
            yield Finding("builds", OK, f"{one.name} is held by {one.holder}")


def find_device_target(capability: tuple[int, int]) -> Arch | None:
    """Return the target of a device's compute capability, or None if there is none."""
    return next((arch for arch in ARCHES.values() if arch.is_cuda and arch.capability == capability), None)
