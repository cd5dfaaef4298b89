"""A pass prepared once and run often: its kernels, its memory, and argument blocks of which only pointers change."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import torch

from .device import current_stream, is_current
from .launch import Launched, account
from .load import Kernel


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


class Step:
    """One launch: ``places`` says where each pointer of the block stands among a run's addresses, ``rest`` follows."""

    def __init__(self, kernel: Kernel, reason: str, places: Sequence[int], rest: bytes) -> None:
        self.kernel, self.reason, self.rest = kernel, reason, rest
        self.pick = itemgetter(*places)
        self.pack = struct.Struct(f"={len(places)}q").pack


class Pass:
    """Launches in order, on tensors whose layouts are known and whose addresses are not.

    The addresses of a run are null, those of the given tensors, those of its own memory, and then ``offsets``, each
    (place of an address before it, bytes behind that).
    """

    def __init__(
        self, device: torch.device, memory: Sequence[Memory], offsets: Sequence[tuple[int, int]], steps: Sequence[Step]
    ) -> None:
        self.device = device
        # torch.empty takes half as long again as torch.empty_strided to read its arguments.
        self._memory = [(one.shape, contiguous_strides(one.shape), one.dtype) for one in memory]
        self._zeros = [number for number, one in enumerate(memory) if one.is_zero]
        self._offsets = tuple(offsets)
        self._steps = tuple(steps)
        self._launched: list[Launched] | None = None

    def run(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Launch on the device's current stream, and account for it; returns the run's memory, in order."""
        device = self.device
        memory = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in self._memory
        ]
        for number in self._zeros:
            memory[number].zero_()
        addresses = [0]
        addresses += [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        addresses += [tensor.data_ptr() for tensor in memory]
        addresses += [addresses[place] + offset for place, offset in self._offsets]
        blocks = [step.pack(*step.pick(addresses)) + step.rest for step in self._steps]
        if is_current(device):
            self._launch(blocks)
        else:
            with torch.cuda.device(device):
                self._launch(blocks)
        return memory

    def _launch(self, blocks: Sequence[bytes]) -> None:
        stream = current_stream(self.device)
        for step, block in zip(self._steps, blocks):
            step.kernel.launch_block(block, stream)
        if self._launched is None:
            # A grid depends on a block's numbers alone, so the first run's are those of all.
            self._launched = [
                Launched(step.kernel, step.kernel.grid(block), step.reason) for step, block in zip(self._steps, blocks)
            ]
        account(self._launched)
