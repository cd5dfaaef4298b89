"""What a pass does with its launches and where its memory comes from: at once, or written down to be run often.

The functions that form a pass are the same for both. ``Executor`` launches and takes memory of torch; ``Recorder``
gives them operands, which have a layout and a symbolic address, and makes a ``Pass`` of what they did.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from ..record import Record
from ..runtime.launch import launch, ready_kernel
from ..runtime.load import Kernel, Step
from ..runtime.prepared import Memory, Pass, contiguous_strides

ALIGNMENT = 256
"""Of every tensor in a run's own memory, as of torch's allocations: kernels copy whole rows at a time."""

_OFFSET_BITS = 44  # of a symbolic address; the number of the tensor stands above them
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1


class Executor:
    """Launches at once, in memory of torch."""

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, is_zero: bool = False
    ) -> torch.Tensor:
        """Return a contiguous tensor, 0 if ``is_zero``, else not initialised."""
        return (torch.zeros if is_zero else torch.empty)(shape, dtype=dtype, device=device)

    def launch(
        self,
        record: Record,
        reason: str,
        values: Mapping[str, object],
        device: torch.device,
        *,
        is_beside: bool = False,
    ) -> None:
        """Launch a record, as ``runtime.launch``; ``is_beside``: it may begin before the launch ahead has ended."""
        launch(record, reason, values, device)


AT_ONCE = Executor()


class Layout(NamedTuple):
    """All of a tensor but its memory and its device; ``strides`` in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def layout_of(tensor: torch.Tensor | None) -> Layout | None:
    """Return a tensor's layout, None for none."""
    return None if tensor is None else Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Operand:
    """Stands for a tensor while a pass is recorded; answers what the functions that form a pass ask of tensors."""

    def __init__(self, layout: Layout, device: torch.device, address: int) -> None:
        self.layout, self.device, self.address = layout, device, address
        self.shape, self.dtype = layout.shape, layout.dtype

    def stride(self) -> tuple[int, ...]:
        """As of a tensor."""
        return self.layout.strides

    def data_ptr(self) -> int:
        """The symbolic address."""
        return self.address

    def dim(self) -> int:
        """As of a tensor."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """As of a tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, rows: slice) -> Operand:
        """Return rows of the first dimension."""
        start, stop, _ = rows.indices(self.shape[0])
        address = self.address + start * self.layout.strides[0] * self.dtype.itemsize
        return Operand(self.layout._replace(shape=(stop - start, *self.shape[1:])), self.device, address)

    def view(self, shape: tuple[int, ...]) -> Operand:
        """As of a contiguous tensor."""
        return Operand(Layout(tuple(shape), contiguous_strides(shape), self.dtype), self.device, self.address)

    def unflatten(self, dim: int, sizes: tuple[int, int]) -> Operand:
        """As of a tensor, of its last dimension."""
        *before, stride = self.layout.strides
        layout = Layout((*self.shape[:-1], *sizes), (*before, sizes[1] * stride, stride), self.dtype)
        return Operand(layout, self.device, self.address)


class _Launch(NamedTuple):
    kernel: Kernel
    reason: str
    pointers: tuple[int, ...]
    rest: bytes
    is_beside: bool


class Kept(NamedTuple):
    """Where something that is kept lies: in which of the kept tensors, how many bytes from its start."""

    number: int
    offset: int
    layout: Layout


class Recording(NamedTuple):
    """A pass and what is what in its memory: outputs in order, then ``num_kept`` kept tensors.

    ``outputs`` are their numbers, None for an absent one.
    """

    run_pass: Pass
    outputs: tuple[int | None, ...]
    first_kept: int
    num_kept: int
    kept: dict[str, Kept]

    def run(self, tensors: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
        """Run the pass; returns its outputs and the kept tensors."""
        memory = self.run_pass.run(tensors)
        first_kept = self.first_kept
        outputs = memory[:first_kept]
        if first_kept < len(self.outputs):
            outputs = [None if number is None else memory[number] for number in self.outputs]
        return outputs, memory[first_kept : first_kept + self.num_kept]

    def kept_layouts(self) -> list[Layout]:
        """The layouts of the kept tensors."""
        return [Layout(*one) for one in self.run_pass.layouts[self.first_kept : self.first_kept + self.num_kept]]


class Recorder(Executor):
    """Writes down launches on operands. ``num_tensors`` are given to each run, the rest is its own memory."""

    def __init__(self, device: torch.device, num_tensors: int) -> None:
        self.device, self.num_tensors = device, num_tensors
        self._memory: list[Memory] = []
        self._launches: list[_Launch] = []

    def tensor(self, number: int, layout: Layout | None, offset: int = 0) -> Operand | None:
        """Return the operand of a tensor that is given to each run, or of a part of it; None for an absent one."""
        if layout is None:
            return None
        return Operand(layout, self.device, (number + 1) << _OFFSET_BITS | offset)

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, is_zero: bool = False
    ) -> Operand:
        """Return the operand of memory of each run."""
        self._memory.append(Memory(tuple(shape), dtype, is_zero))
        address = (self.num_tensors + len(self._memory)) << _OFFSET_BITS
        return Operand(Layout(tuple(shape), contiguous_strides(shape), dtype), device, address)

    def launch(
        self,
        record: Record,
        reason: str,
        values: Mapping[str, object],
        device: torch.device,
        *,
        is_beside: bool = False,
    ) -> None:
        """Write a launch down. Its kernel is loaded here."""
        kernel = ready_kernel(record, device)
        if record.family == "cpu":
            values = {**values, "num_threads": torch.get_num_threads()}
        block, count = record.entry.pack(values), record.entry.num_pointers
        pointers = struct.unpack_from(f"={count}q", block)
        self._launches.append(_Launch(kernel, reason, pointers, block[8 * count :], is_beside))

    def finish(self, outputs: Sequence[Operand | None], kept: Mapping[str, Operand | None]) -> Recording:
        """Return the pass. Outputs and kept operands are whole allocations, of the shapes that they have here.

        What is kept is cut from one allocation, and so is what only the pass itself needs, where two share their place
        if no launch needs both. Outputs, and what must be 0, are tensors of their own.
        """
        returned = [None if one is None else self._index(one.address) for one in outputs]
        kept_indices = {name: self._index(one.address) for name, one in kept.items() if one is not None}
        pooled = [i for i in kept_indices.values() if not self._memory[i].is_zero]
        zeros = [i for i in kept_indices.values() if self._memory[i].is_zero]
        own = [i for i in returned if i is not None]
        rest = [i for i in range(len(self._memory)) if i not in {*own, *pooled, *zeros}]
        scratch_zeros = [i for i in rest if self._memory[i].is_zero]
        scratch = [i for i in rest if not self._memory[i].is_zero]

        shapes = {i: one.shape for i, one in zip(returned, outputs) if i is not None}
        memory: list[Memory] = []
        places: dict[int, tuple[int, int]] = {}

        def alone(indices: Sequence[int]) -> None:
            for i in indices:
                places[i] = (len(memory), 0)
                memory.append(self._memory[i]._replace(shape=shapes.get(i, self._memory[i].shape)))

        def together(offsets: Mapping[int, int]) -> None:
            if offsets:
                size = max(offset + self._size(i) for i, offset in offsets.items())
                places.update({i: (len(memory), offset) for i, offset in offsets.items()})
                memory.append(Memory((size,), torch.uint8))

        alone(own)
        together(self._stacked(pooled))
        alone(zeros)
        num_kept = len(memory) - len(own)
        alone(scratch_zeros)
        together(self._shared(scratch))

        where = {
            name: Kept(places[i][0] - len(own), places[i][1], kept[name].layout) for name, i in kept_indices.items()
        }
        numbers = tuple(None if i is None else places[i][0] for i in returned)
        return Recording(self._pass(memory, places), numbers, len(own), num_kept, where)

    def _index(self, address: int) -> int:
        """The number of an allocation, negative for a given tensor or null."""
        return (address >> _OFFSET_BITS) - 1 - self.num_tensors

    def _size(self, index: int) -> int:
        one = self._memory[index]
        return -(-prod(one.shape) * one.dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def _stacked(self, indices: Sequence[int]) -> dict[int, int]:
        offsets, end = {}, 0
        for i in indices:
            offsets[i] = end
            end += self._size(i)
        return offsets

    def _shared(self, indices: Sequence[int]) -> dict[int, int]:
        """Offsets of allocations that may share their place: large ones first, each at the lowest offset that is free.

        An allocation is in use from its first launch to its last; of one that begins beside the launch ahead, from
        that on.
        """
        spans: dict[int, tuple[int, int]] = {}
        for number, one in enumerate(self._launches):
            for address in one.pointers:
                first, _ = spans.get(self._index(address), (number - one.is_beside, number))
                spans[self._index(address)] = (first, number)
        offsets: dict[int, int] = {}
        for i in sorted((i for i in indices if i in spans), key=self._size, reverse=True):
            first, last = spans[i]
            offset = 0
            for other in sorted(offsets, key=offsets.get):
                begins_later, ended_before = spans[other][0] > last, spans[other][1] < first
                if begins_later or ended_before or offset + self._size(i) <= offsets[other]:
                    continue
                offset = max(offset, offsets[other] + self._size(other))
            offsets[i] = offset
        return offsets

    def _pass(self, memory: Sequence[Memory], places: Mapping[int, tuple[int, int]]) -> Pass:
        def pointer(address: int) -> tuple[int, int]:
            number, offset = address >> _OFFSET_BITS, address & _OFFSET_MASK
            if number <= self.num_tensors:
                return number, offset
            position, start = places[number - 1 - self.num_tensors]
            return 1 + self.num_tensors + position, start + offset

        steps = [Step(one.kernel, one.reason, [*map(pointer, one.pointers)], one.rest) for one in self._launches]
        return Pass(self.device, self.num_tensors, memory, steps)
