"""Load a verified library and call it: the only place where foreign code enters the process."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..arch import Arch
from ..compiler.build import Artifact, build
from ..compiler.cache import verify_artifact
from ..errors import AbiMismatch, DriverTooOld, LoadError, UnsupportedProblemError
from ..record import Record

_BAD_ARGUMENT = 1  # Status::kBadArgument of templates/host/args.jinja
_STEP_STATUSES = 256  # kStepStatuses of templates/host/steps.hpp
_STEP = struct.Struct("=qii")  # Step there
_NEEDS_NEWER_DRIVER = ("cudaErrorInsufficientDriver", "cudaErrorCallRequiresNewerDriver", "is not in this driver")
"""What a library says where the driver is too old for the runtime in it, or lacks a function that it calls."""


class Kernel:
    """A loaded library: its record, its artifact and its entry functions.

    Errors: ``launch``, ``launch_all`` and ``grid`` raise UnsupportedProblemError with the library's own message for a
    bad argument, the first two LoadError when the device refused the launch, DriverTooOld when the driver did.
    """

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self.record = artifact.record
        self._entry = artifact.record.entry
        self._library = _open(artifact)
        symbol = self.record.symbol
        abi = self._function(symbol + "__abi", ctypes.c_uint64, ())()
        if abi != self._entry.abi:
            raise AbiMismatch(
                f"{artifact.library} has argument layout {abi:016x}; {self.record.name} has "
                f"{self._entry.abi:016x}; remove the entry or rebuild it"
            )
        self._launch = self._function(symbol, ctypes.c_int, (ctypes.c_char_p, ctypes.c_void_p))
        run = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
        self._run = self._function(symbol + "__run", ctypes.c_int, run)
        self._grid = self._function(symbol + "__grid", ctypes.c_int, (ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64)))
        self._error = self._function(symbol + "__error", ctypes.c_char_p, ())

    @property
    def arch(self) -> str:
        """Name of the target."""
        return self.artifact.arch

    @property
    def origin(self) -> str:
        """Where the library came from in this process: built, cache or prebuilt."""
        return self.artifact.origin

    def launch(self, values: Mapping[str, object], stream: int = 0) -> bytes:
        """Launch with one value per field of the record's entry; returns the packed argument block."""
        block = self._entry.pack(values)
        status = self._launch(block, stream)
        if status:
            self._raise(status)
        return block

    def launch_all(self, steps: Steps, addresses: bytes, stream: int = 0) -> None:
        """Launch steps of any libraries by one call into this one; ``addresses`` are the run's, int64, the first null.

        What a step raises is what its own kernel's ``launch`` would; those ahead of it are launched, none behind it.
        """
        failed = self._run(steps.packed, addresses, stream)
        if failed:
            number, status = divmod(failed, _STEP_STATUSES)
            steps.each[number].kernel._raise(status)

    def grid(self, block: bytes) -> tuple[int, int, int]:
        """Return the grid that the entry computes for a packed argument block."""
        size = (ctypes.c_int64 * 3)()
        status = self._grid(block, size)
        if status:
            self._raise(status)
        return tuple(size)

    def _function(self, name: str, result: type, arguments: tuple[type, ...]):
        function = getattr(self._library, name)
        function.restype = result
        function.argtypes = arguments
        return function

    def _raise(self, status: int) -> None:
        message = f"{self.record.symbol}: {self._error().decode()}"
        if status == _BAD_ARGUMENT:
            raise UnsupportedProblemError(message)
        if any(words in message for words in _NEEDS_NEWER_DRIVER):
            built_with = self.artifact.provenance["toolchain"]["cuda"]["version"]
            raise DriverTooOld(
                f"{message}; it was built with CUDA {built_with}, and this machine has {_driver()}: update the driver, "
                "or build with an older nvcc, named in CAKE_KDA_JIT_NVCC"
            )
        raise LoadError(message)


class Step(NamedTuple):
    """One launch of a pass: ``pointers`` say where each pointer of its block leads, ``rest`` follows them.

    A pointer is (number of one of the run's addresses, bytes behind that); ``reason`` says why the record was chosen.
    """

    kernel: Kernel
    reason: str
    pointers: Sequence[tuple[int, int]]
    rest: bytes

    def block(self, addresses: Sequence[int]) -> bytes:
        """Return the argument block of a run, which ``launch_all`` builds by itself."""
        found = [addresses[number] + offset for number, offset in self.pointers]
        return struct.pack(f"={len(found)}q", *found) + self.rest


class Steps:
    """Steps as ``launch_all`` takes them, in the layout of templates/host/steps.hpp."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.each = tuple(steps)
        self.packed = b"".join(map(_packed, steps)) + _STEP.pack(0, 0, 0)


def _packed(step: Step) -> bytes:
    entry = ctypes.cast(step.kernel._launch, ctypes.c_void_p).value
    pointers = b"".join(struct.pack("=qq", *pointer) for pointer in step.pointers)
    return _STEP.pack(entry, len(step.pointers), len(step.rest)) + pointers + step.rest


def _driver() -> str:
    """What the CUDA driver of this machine is, in words."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return "no CUDA driver"
    return f"a driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def _open(artifact: Artifact) -> ctypes.CDLL:
    # A truncated library kills the process with SIGBUS inside dlopen: its size and digest come first.
    verify_artifact(artifact)
    try:
        return ctypes.CDLL(str(artifact.library), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise LoadError(f"{artifact.library} could not be loaded: {error}") from error


_kernels: dict[tuple[int, str], Kernel] = {}
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# A child forked while another thread compiles would inherit a lock that nobody releases.
os.register_at_fork(after_in_child=_renew_lock)


def load(artifact: Artifact) -> Kernel:
    """Load an artifact after verifying its size and digest; raises LoadError or AbiMismatch."""
    return Kernel(artifact)


def get_kernel(record: Record, arch: Arch) -> Kernel:
    """Return the loaded kernel of a record, compiled first if no cache holds it.

    Errors: BuildError and LoadError of the stage that failed.
    """
    # Keyed by identity, because hashing a record's whole entry costs more than a launch; the kernel keeps the
    # record alive, so an identity is never reused.
    key = (id(record), arch.name)
    kernel = _kernels.get(key)
    if kernel is not None:
        return kernel
    with _lock:
        if key not in _kernels:
            _kernels[key] = load(build(record, arch))
        return _kernels[key]


def is_loaded(record: Record, arch: Arch) -> bool:
    """Whether the record's kernel is loaded in this process."""
    return (id(record), arch.name) in _kernels


def loaded_kernels() -> list[Kernel]:
    """Return the kernels loaded in this process, in the order of loading."""
    return list(_kernels.values())
