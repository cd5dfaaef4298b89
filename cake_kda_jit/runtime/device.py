"""What a torch device is to us: its target and its current stream."""

from __future__ import annotations

from functools import cache

import torch

from ..arch import Arch, arch_of_capability, host_arch
from ..errors import UnsupportedProblemError


@cache
def arch_of_device(device: torch.device) -> Arch:
    """Return the target of a device; a CUDA device's by its exact compute capability."""
    if device.type == "cpu":
        return host_arch()
    if device.type == "cuda":
        return arch_of_capability(*torch.cuda.get_device_capability(device.index))
    raise UnsupportedProblemError(
        f"tensors are on {device.type!r}; kernels exist for 'cpu' and 'cuda': move them there"
    )


def current_stream(device: torch.device) -> int:
    """Return the handle of the device's current CUDA stream, 0 on a CPU."""
    # Not torch.cuda.current_stream(device).cuda_stream: making that object takes longer than a launch.
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def is_current(device: torch.device) -> bool:
    """Whether launches on a device go to it as things stand: a CPU, or the current CUDA device."""
    # Not torch.cuda.current_device(), which first asks whether CUDA is initialised: a tensor is there.
    return device.type == "cpu" or device.index == torch._C._cuda_getDevice()


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
