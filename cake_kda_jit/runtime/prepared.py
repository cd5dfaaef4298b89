"""A pass prepared once and run often: its kernels, its memory, and argument blocks of which only pointers change."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .device import cuda_index, current_stream, empty_tensors, is_current
from .launch import Launched, account
from .load import Step, Steps


class Memory(NamedTuple):
    """One allocation of a run, a contiguous tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_zero: bool = False


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= max(length, 1)
    return tuple(reversed(strides))


class Pass:
    """Launches in order, on tensors whose layouts are known and whose addresses are not.

    The addresses of a run are null, those of the ``num_tensors`` given tensors, and those of its own memory, whose
    ``layouts`` are (shape, strides, dtype).
    """

    def __init__(self, device: torch.device, num_tensors: int, memory: Sequence[Memory], steps: Sequence[Step]) -> None:
        self.device, self._index = device, cuda_index(device)
        self.layouts = [(one.shape, contiguous_strides(one.shape), one.dtype) for one in memory]
        self._zeros = [number for number, one in enumerate(memory) if one.is_zero]
        self._pack = struct.Struct(f"=8x{num_tensors + len(memory)}q").pack  # 8x is null
        self._steps = Steps(steps)
        self._launched: list[Launched] | None = None

    def run(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Launch on the device's current stream, and account for it; returns the run's memory, in order."""
        if is_current(self._index):
            return self._run(tensors)
        with torch.cuda.device(self.device):
            return self._run(tensors)

    def _run(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        memory = empty_tensors(self.layouts, self._index)
        for number in self._zeros:
            memory[number].zero_()
        given = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        addresses = self._pack(*given, *[tensor.data_ptr() for tensor in memory])
        if self._steps.each:
            self._steps.each[0].kernel.launch_all(self._steps, addresses, current_stream(self._index))
        if self._launched is None:
            self._launched = self._launches(addresses)
        account(self._launched)
        return memory

    def _launches(self, addresses: bytes) -> list[Launched]:
        """What a run leaves behind: a grid depends on a block's numbers alone, so the first run's are those of all."""
        numbers = struct.unpack(f"={len(addresses) // 8}q", addresses)
        return [Launched(one.kernel, one.kernel.grid(one.block(numbers)), one.reason) for one in self._steps.each]
