"""Launch a selected record on tensors' device and keep account of what ran."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..errors import ColdCallInCapture
from ..record import Record
from .device import arch_of_device, current_stream, is_capturing
from .load import get_kernel, is_loaded


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


class _Account(threading.local):
    """The launches of the operation that this thread is in, None outside one."""

    launches: list[LaunchRecord] | None = None


_last_operation: tuple[LaunchRecord, ...] = ()
_account = _Account()


@contextmanager
def operation() -> Iterator[None]:
    """Account for the launches inside as one operation, published whole when it ends without an error.

    A launch outside one is an operation by itself.
    """
    _account.launches = []
    try:
        yield
        _publish(tuple(_account.launches))
    finally:
        _account.launches = None


def last_launches() -> list[LaunchRecord]:
    """Return what the last operation of any thread launched, in order.

    A forward, a backward and the making of a plan are operations of their own; a call without a plan makes one first.
    """
    return list(_last_operation)


def launch(record: Record, reason: str, values: Mapping[str, object], device: torch.device) -> None:
    """Launch a record on a device's current stream.

    ``values`` has one entry per field of the record's entry, tensors as ``data_ptr()`` and None for null;
    ``num_threads`` of the cpu family is filled in here. Raises ColdCallInCapture for a kernel first used inside CUDA
    graph capture, where nothing may be compiled.
    """
    arch = arch_of_device(device)
    if is_capturing(device) and not is_loaded(record, arch):
        raise ColdCallInCapture(
            f"{record.symbol} was first called inside CUDA graph capture; run the same call once "
            "before the capture to warm it up"
        )
    kernel = get_kernel(record, arch)
    if record.family == "cpu":
        values = {**values, "num_threads": torch.get_num_threads()}
        block = kernel.launch(values)
    else:
        with torch.cuda.device(device):
            block = kernel.launch(values, current_stream(device))
    # The grid is asked for now: an entry may read the arguments' tables, which live no longer than this call.
    grid = kernel.grid(block)
    launched = LaunchRecord(record.program, record.variant, record.family, arch.name, grid, reason, kernel.origin)
    if _account.launches is None:
        _publish((launched,))
    else:
        _account.launches.append(launched)


def _publish(launches: tuple[LaunchRecord, ...]) -> None:
    global _last_operation
    _last_operation = launches
