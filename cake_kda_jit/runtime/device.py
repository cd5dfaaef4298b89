"""What a torch device is to us: its target, its current stream, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from ..arch import Arch, arch_of_capability, host_arch
from ..errors import UnsupportedProblemError

try:  # What inductor's code calls: torch.empty_strided without the dispatcher, in less than half its time.
    from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda
except ImportError:  # no public interface of torch
    _empty_strided_cpu = _empty_strided_cuda = None


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


def cuda_index(device: torch.device) -> int | None:
    """Return the index of a CUDA device, which it must have, None for a CPU.

    A device takes as long to say its type as a call takes.
    """
    return int(device.index) if device.type == "cuda" else None


def current_stream(index: int | None) -> int:
    """Return the handle of a CUDA device's current stream, by the device's index; 0 for None, a CPU."""
    # Not torch.cuda.current_stream(index).cuda_stream: making that object takes longer than a launch.
    return 0 if index is None else torch._C._cuda_getCurrentRawStream(index)


def is_current(index: int | None) -> bool:
    """Whether launches on a device go to it as things stand: the current CUDA device, or None, a CPU."""
    # Not torch.cuda.current_device(), which first asks whether CUDA is initialised: a tensor is there.
    return index is None or index == torch._C._cuda_getDevice()


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def empty_tensors(
    layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]], index: int | None
) -> list[torch.Tensor]:
    """Return a tensor, not initialised, for each (shape, strides, dtype), on a device that ``is_current``."""
    # With deterministic algorithms torch fills what it hands out, unless told not to.
    if _empty_strided_cpu is None or torch.are_deterministic_algorithms_enabled():
        device = torch.device("cpu") if index is None else torch.device("cuda", index)
        return [torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in layouts]
    empty = _empty_strided_cpu if index is None else _empty_strided_cuda
    return [empty(shape, strides, dtype) for shape, strides, dtype in layouts]
