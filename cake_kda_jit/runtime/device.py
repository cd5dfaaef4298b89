"""What a torch device is to us: its target and its current stream."""

from __future__ import annotations

from functools import cache

import torch

from ..arch import Arch, arch_of_capability, host_arch
from ..errors import UnsupportedProblemError


@cache
def _arch_of(device_type: str, index: int | None) -> Arch:
    if device_type == "cpu":
        return host_arch()
    if device_type == "cuda":
        return arch_of_capability(*torch.cuda.get_device_capability(index))
    raise UnsupportedProblemError(
        f"tensors are on {device_type!r}; kernels exist for 'cpu' and 'cuda': move them there"
    )


def arch_of_device(device: torch.device) -> Arch:
    """Return the target of a device; a CUDA device's by its exact compute capability."""
    return _arch_of(device.type, device.index)


def current_stream(device: torch.device) -> int:
    """Return the handle of the device's current CUDA stream, 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
