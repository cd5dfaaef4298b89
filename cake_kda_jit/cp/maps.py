"""From the local buffers of other libraries to the local tensors of a partition, and back.

A buffer of Transformer Engine, PyTorch or FLA holds the tokens of a rank in the order of a ``Partition`` already; one
of Megatron also has slots that hold padding. A map has both: the partition, and the slot of each of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import UnsupportedProblemError
from ..ops.pack import boundaries_from
from . import layouts
from .partition import Partition
from .tensors import check_length, index_of_ranges


@dataclass(frozen=True)
class BufferMap:
    """The local buffers of another library, as a partition of the real tokens and where they lie.

    ``library`` is its name. ``cu_seqlens_padded`` are the document boundaries of the whole padded buffer; they equal
    the partition's where the library pads nothing. Every rank's buffer has ``num_slots`` slots.
    """

    library: str
    partition: Partition
    cu_seqlens_padded: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        """Slots of the buffer of a rank, padding included; all ranks have equally many."""
        return self.cu_seqlens_padded[-1] // self.partition.world_size

    @property
    def has_padding(self) -> bool:
        """Whether some slots hold no token of the pack; ``to_buffer`` then writes zeros, not what was there."""
        return self.cu_seqlens_padded != self.partition.cu_seqlens

    @property
    def caveat(self) -> str:
        """What the map cannot keep, in a sentence; empty where it is exact both ways."""
        if not self.has_padding:
            return ""
        padding = self.cu_seqlens_padded[-1] - self.partition.num_tokens
        return (
            f"{padding} of the {self.cu_seqlens_padded[-1]} slots of {self.library} are padding: from_buffer leaves "
            "them out, to_buffer writes zeros there"
        )

    def num_padding(self, rank: int) -> int:
        """Return how many slots of a rank hold padding."""
        return self.num_slots - self.partition.num_local_tokens(rank)

    def slots(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the slot of each local token of the partition, int64 ``[num_local_tokens(rank)]``."""
        return index_of_ranges(self._slot_ranges(rank), device)

    def tokens(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the pack token in each slot of a rank, int64 ``[num_slots]``; -1 is padding."""
        empty = torch.full((self.num_slots,), -1, dtype=torch.int64, device=device)
        return empty.index_copy(0, self.slots(rank, device), self.partition.local_index(rank, device))

    def from_buffer(self, buffer: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """Return the partition's local tensor from a rank's buffer, without padding; a copy, differentiable.

        Raises UnsupportedProblemError unless the dimension has ``num_slots`` slots.
        """
        check_length("buffer", buffer, dim, self.num_slots, f"a buffer of {self.library} has")
        return buffer.index_select(dim, self.slots(rank, buffer.device))

    def to_buffer(self, x: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """Return a rank's buffer from the partition's local tensor, zeros in place of padding; differentiable.

        Raises UnsupportedProblemError unless the dimension has the rank's tokens.
        """
        check_length("x", x, dim, self.partition.num_local_tokens(rank), f"rank {rank} holds")
        shape = list(x.shape)
        shape[dim] = self.num_slots
        return x.new_zeros(shape).index_copy(dim, self.slots(rank, x.device), x)

    def _slot_ranges(self, rank: int) -> tuple[range, ...]:
        if not self.has_padding:
            return (range(self.partition.num_local_tokens(rank)),)
        cu, padded, world_size = self.partition.cu_seqlens, self.cu_seqlens_padded, self.partition.world_size
        found = []
        for document, start, end, _ in self.partition.fragments(rank):
            # A document has the same share of every rank's buffer: its head chunk, then its tail chunk.
            chunk_tokens = (padded[document + 1] - padded[document]) // (2 * world_size)
            slot = padded[document] // world_size
            if (start - cu[document]) // chunk_tokens >= world_size:
                slot += chunk_tokens
            found.append(range(slot, slot + end - start))
        return tuple(found)


def megatron(
    cu_seqlens: Sequence[int] | torch.Tensor, cu_seqlens_padded: Sequence[int] | torch.Tensor, world_size: int
) -> BufferMap:
    """Return the map of Megatron's THD buffers: each document padded to a multiple of 2W and cut in 2W chunks.

    ``cu_seqlens`` ``[N + 1]`` (``cu_seqlens_q`` there) counts tokens alone, ``cu_seqlens_padded`` ``[N + 1]`` with the
    padding behind each document. Raises UnsupportedProblemError naming a document that does not fit.
    """
    partition = Partition.from_padded(cu_seqlens, cu_seqlens_padded, world_size)
    return BufferMap("Megatron", partition, boundaries_from(cu_seqlens_padded, "cu_seqlens_padded"))


def transformer_engine(cu_seqlens_padded: Sequence[int] | torch.Tensor, world_size: int) -> BufferMap:
    """Return the map of Transformer Engine's THD shards, to which padding is like any token: per document, 2W chunks.

    ``partition.local_index(rank)`` is what its ``thd_get_partitioned_indices`` returns. Raises UnsupportedProblemError
    naming a document whose length is no multiple of 2W; to leave its padding out, use ``megatron``.
    """
    cu = boundaries_from(cu_seqlens_padded, "cu_seqlens_padded")
    layouts.check_world_size(world_size)
    for document, (start, end) in enumerate(zip(cu, cu[1:])):
        _check_divides(f"document {document}", end - start, 2 * world_size, "Transformer Engine", "per_document_zigzag")
    return BufferMap("Transformer Engine", Partition.per_document_zigzag(cu, world_size), cu)


def pytorch_head_tail(cu_seqlens: Sequence[int] | torch.Tensor, world_size: int) -> BufferMap:
    """Return the map of the shards of PyTorch's ``context_parallel`` with its head-tail load balancer.

    Raises UnsupportedProblemError unless the pack's length is a multiple of 2W, as PyTorch does.
    """
    cu = boundaries_from(cu_seqlens)
    layouts.check_world_size(world_size)
    _check_divides("the pack", cu[-1], 2 * world_size, "PyTorch's head-tail load balancer", "zigzag")
    return BufferMap("PyTorch", Partition.zigzag(cu, world_size), cu)


def fla(cu_seqlens: Sequence[int] | torch.Tensor, world_size: int, layout: str = "contiguous") -> BufferMap:
    """Return the map of the shards that flash-linear-attention's ``build_cp_context`` expects for a layout.

    ``layout`` is contiguous or zigzag, both over the whole pack. Raises UnsupportedProblemError for another one, and
    unless the pack's length is a multiple of W, or of 2W for zigzag, as FLA does.
    """
    cu = boundaries_from(cu_seqlens)
    layouts.check_world_size(world_size)
    if layout not in ("contiguous", "zigzag"):
        raise UnsupportedProblemError(f"layout={layout!r}; FLA has contiguous and zigzag, both over the whole pack")
    parts = world_size if layout == "contiguous" else 2 * world_size
    _check_divides("the pack", cu[-1], parts, f"FLA's {layout} layout", layout)
    return BufferMap("FLA", getattr(Partition, layout)(cu, world_size), cu)


def _check_divides(what: str, tokens: int, parts: int, library: str, ragged: str) -> None:
    if tokens % parts:
        raise UnsupportedProblemError(
            f"{what} has {tokens} tokens; {library} needs a multiple of {parts}, so it holds no such shards: pad to "
            f"{-(-tokens // parts) * parts}, or use Partition.{ragged}, which needs no padding"
        )
