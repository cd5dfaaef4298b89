"""Launch a selected record on tensors' device and keep account of what ran."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import ColdCallInCapture
from ..record import Record
from .device import arch_of_device, cuda_index, current_stream, is_capturing, is_current
from .load import Kernel, get_kernel, is_loaded


@dataclass(frozen=True)
class LaunchRecord:
    """One launch of the last call: what ran, why it was chosen, and where its library came from.

    ``grid`` is what the library's entry computed; ``origin`` is built, cache or prebuilt.
    """

    program: str
    variant: str
    family: str
    arch: str
    grid: tuple[int, int, int]
    reason: str
    origin: str


class Launched(NamedTuple):
    """What a launch leaves behind; a ``LaunchRecord`` is made of it when somebody asks."""

    kernel: Kernel
    grid: tuple[int, int, int]
    reason: str

    def record(self) -> LaunchRecord:
        """Return the launch in words."""
        described = self.kernel.record
        names = (described.program, described.variant, described.family, self.kernel.arch)
        return LaunchRecord(*names, self.grid, self.reason, self.kernel.origin)


class _Account(threading.local):
    """The launches of the operation that this thread is in, None outside one."""

    launches: list[Launched] | None = None


_last_operation: list[Launched] = []
_account = _Account()


class operation:
    """Account for the launches inside as one operation, published whole when it ends without an error.

    A launch outside one is an operation by itself.
    """

    def __enter__(self) -> None:
        _account.launches = []

    def __exit__(self, error: type | None, *_: object) -> None:
        if error is None:
            _publish(_account.launches)
        _account.launches = None


def last_launches() -> list[LaunchRecord]:
    """Return what the last operation of any thread launched, in order.

    A forward, a backward and the making of a plan are operations of their own; a call without a plan makes one first.
    """
    return [launched.record() for launched in _last_operation]


def launch(record: Record, reason: str, values: Mapping[str, object], device: torch.device) -> None:
    """Launch a record on a device's current stream.

    ``values`` has one entry per field of the record's entry, tensors as ``data_ptr()`` and None for null;
    ``num_threads`` of the cpu family is filled in here. Raises ColdCallInCapture for a kernel first used inside CUDA
    graph capture, where nothing may be compiled.
    """
    kernel, index = ready_kernel(record, device), cuda_index(device)
    if record.family == "cpu":
        block = kernel.launch({**values, "num_threads": torch.get_num_threads()})
    elif is_current(index):
        block = kernel.launch(values, current_stream(index))
    else:
        with torch.cuda.device(device):
            block = kernel.launch(values, current_stream(index))
    # The grid is asked for now: an entry may read the arguments' tables, which live no longer than this call.
    account([Launched(kernel, kernel.grid(block), reason)])


def ready_kernel(record: Record, device: torch.device) -> Kernel:
    """Return a record's kernel for a device, loaded; raises ColdCallInCapture instead of loading one in a capture."""
    arch = arch_of_device(device)
    if not is_loaded(record, arch) and is_capturing(device):
        raise ColdCallInCapture(
            f"{record.symbol} was first called inside CUDA graph capture; run the same call once "
            "before the capture to warm it up"
        )
    return get_kernel(record, arch)


def account(launched: list[Launched]) -> None:
    """Add launches to the operation that this thread is in; outside one they are an operation by themselves."""
    if _account.launches is None:
        _publish(launched)
    else:
        _account.launches += launched


def _publish(launches: list[Launched]) -> None:
    global _last_operation
    _last_operation = launches
