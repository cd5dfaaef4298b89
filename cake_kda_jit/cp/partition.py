"""Which rank holds which tokens of a pack. No torch before a tensor is asked for."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from hashlib import blake2b
from itertools import accumulate, compress, repeat
from typing import TYPE_CHECKING

from ..errors import UnsupportedProblemError
from ..ops.pack import Fragment, boundaries_from
from . import layouts

if TYPE_CHECKING:
    from os import PathLike

    import torch

    from .explain import Explanation

# Several times quicker than the constructor's own checks of names and numbers.
_new_fragment = partial(tuple.__new__, Fragment)


@dataclass(frozen=True)
class Partition:
    """Every token of a pack on exactly one rank. Made by its class methods; immutable, hashable, picklable.

    ``cu_seqlens`` are the N + 1 document boundaries in tokens and ``layout`` how the ranks share them. ``starts`` and
    ``ranks`` are the first token and the rank of each fragment in the order of the pack; a fragment has at least one
    token and ends where the next one starts. ``order`` lists the fragments so that those of a rank stand in the order
    of its memory; None is the order of the pack.
    """

    cu_seqlens: tuple[int, ...]
    world_size: int
    layout: str
    starts: tuple[int, ...]
    ranks: tuple[int, ...]
    order: tuple[int, ...] | None = None

    @classmethod
    def contiguous(cls, cu_seqlens: Sequence[int] | torch.Tensor, world_size: int) -> Partition:
        """Give rank r the tokens floor(rT/W) to floor((r+1)T/W) of the pack.

        Here and below, ``cu_seqlens`` ``[N + 1]`` is a list, a tuple, a NumPy array or a tensor on any device. Raises
        UnsupportedProblemError for boundaries or a world size that describe no pack.
        """
        cu = _checked(cu_seqlens, world_size)
        return cls._of(cu, world_size, "contiguous", layouts.spans(cu, range(world_size)))

    @classmethod
    def zigzag(cls, cu_seqlens: Sequence[int] | torch.Tensor, world_size: int) -> Partition:
        """Cut the pack in 2W spans, as ``contiguous`` would, and give rank r span r and then span 2W - 1 - r."""
        cu = _checked(cu_seqlens, world_size)
        return cls._of(cu, world_size, "zigzag", layouts.spans(cu, layouts.zigzag_ranks(world_size)))

    @classmethod
    def per_document_zigzag(cls, cu_seqlens: Sequence[int] | torch.Tensor, world_size: int) -> Partition:
        """Cut each document in 2W chunks; rank r has, document by document, chunk r and then chunk 2W - 1 - r.

        Lengths need not divide: the first L mod 2W chunks of a document have one token more, and chunks may be empty.
        """
        cu = _checked(cu_seqlens, world_size)
        return cls._of(cu, world_size, "per_document_zigzag", layouts.per_document_zigzag(cu, world_size))

    @classmethod
    def balanced(cls, cu_seqlens: Sequence[int] | torch.Tensor, world_size: int, *, whole_below: int) -> Partition:
        """Keep documents of less than ``whole_below`` tokens whole, and level the ranks with the longer ones.

        Whole documents need no exchange. The longer ones are cut W - 1 times in all, at most.
        """
        cu = _checked(cu_seqlens, world_size)
        if not layouts.is_count(whole_below):
            raise UnsupportedProblemError(f"whole_below={whole_below!r}; give a number of tokens, 0 to keep none whole")
        return cls._of(cu, world_size, "balanced", layouts.balanced(cu, world_size, whole_below))

    @classmethod
    def from_fragments(
        cls,
        cu_seqlens: Sequence[int] | torch.Tensor,
        fragments: Iterable[tuple[int, int, int]],
        world_size: int | None = None,
    ) -> Partition:
        """Take the ranges ``(rank, start, end)`` of pack tokens, half open; a rank holds its own in the order given.

        A range that spans several documents becomes one fragment in each; empty ones are dropped. ``world_size`` is
        the highest rank + 1 by default; give it when the last ranks hold nothing. Raises UnsupportedProblemError with
        the tokens that two ranges share or that no range holds.
        """
        cu = boundaries_from(cu_seqlens)
        ranges = layouts.checked_ranges(fragments, cu[-1])
        size = max((rank for rank, _, _ in ranges), default=0) + 1 if world_size is None else world_size
        layouts.check_world_size(size)
        starts, ranks, order = layouts.custom(cu, ranges, size)
        # One order has one form, so that equal partitions are equal: by rank, and None for the order of the pack.
        by_rank = sorted(order, key=ranks.__getitem__)
        is_pack_order = by_rank == sorted(range(len(ranks)), key=ranks.__getitem__)
        return cls(cu, size, "custom", tuple(starts), tuple(ranks), None if is_pack_order else tuple(by_rank))

    @classmethod
    def from_padded(
        cls,
        cu_seqlens: Sequence[int] | torch.Tensor,
        cu_seqlens_padded: Sequence[int] | torch.Tensor,
        world_size: int,
    ) -> Partition:
        """Cut documents where Megatron and Transformer Engine cut the padded ones; no rank holds the padding itself.

        ``cu_seqlens`` ``[N + 1]`` are the boundaries without padding, ``cu_seqlens_padded`` ``[N + 1]`` those of the
        padded buffer: each padded length holds its document and is a multiple of 2W, else UnsupportedProblemError
        names the document.
        """
        cu = _checked(cu_seqlens, world_size)
        padded = boundaries_from(cu_seqlens_padded, "cu_seqlens_padded")
        columns = layouts.padded_zigzag(cu, layouts.padded_chunk_tokens(cu, padded, world_size), world_size)
        return cls._of(cu, world_size, "padded_per_document_zigzag", columns)

    @classmethod
    def _of(cls, cu: tuple[int, ...], world_size: int, layout: str, columns: layouts.Columns) -> Partition:
        return cls(cu, int(world_size), layout, tuple(columns[0]), tuple(columns[1]))

    @property
    def num_documents(self) -> int:
        """N, empty documents included."""
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """T, the pack's length."""
        return self.cu_seqlens[-1]

    @property
    def num_fragments(self) -> int:
        """Fragments of all ranks; each has at least one token."""
        return len(self.starts)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The token after each fragment, in the order of the pack."""
        return (*self.starts[1:], self.num_tokens)[: self.num_fragments]

    @cached_property
    def documents(self) -> tuple[int, ...]:
        """The document of each fragment, in the order of the pack."""
        found: list[int] = []
        for document, end in enumerate(self.cu_seqlens[1:]):
            found += repeat(document, bisect_left(self.starts, end, len(found)) - len(found))
        return tuple(found)

    @cached_property
    def numbers_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of each rank's fragments, counted along the pack, in the order of the rank's memory."""
        found: list[list[int]] = [[] for _ in range(self.world_size)]
        add = [numbers.append for numbers in found]
        ranks = self.ranks
        for number in range(len(ranks)) if self.order is None else self.order:
            add[ranks[number]](number)
        return tuple(map(tuple, found))

    def fragments(self, rank: int) -> tuple[Fragment, ...]:
        """Return the rank's fragments in the order of its memory; none is empty."""
        numbers = self._numbers(rank)
        columns = (map(column.__getitem__, numbers) for column in (self.documents, self.starts, self.ends))
        return tuple(map(_new_fragment, zip(*columns, repeat(rank))))

    def all_fragments(self) -> tuple[Fragment, ...]:
        """Return the fragments of all ranks in the order of the pack."""
        return tuple(map(_new_fragment, zip(self.documents, self.starts, self.ends, self.ranks)))

    def local_cu_seqlens(self, rank: int) -> tuple[int, ...]:
        """Return the boundaries of the rank's fragments in its local tensor, from 0 to its number of tokens."""
        starts, ends = self.starts, self.ends
        return tuple(accumulate((ends[n] - starts[n] for n in self._numbers(rank)), initial=0))

    def num_local_tokens(self, rank: int) -> int:
        """Return how many tokens the rank holds."""
        self._check_rank(rank)
        return self.tokens_by_rank[rank]

    @cached_property
    def tokens_by_rank(self) -> tuple[int, ...]:
        """How many tokens each rank holds."""
        found = [0] * self.world_size
        for rank, start, end in zip(self.ranks, self.starts, self.ends):
            found[rank] += end - start
        return tuple(found)

    def local_ranges(self, rank: int) -> tuple[range, ...]:
        """Return the pack tokens of the rank in the order of its memory, as few ranges as possible."""
        found: list[range] = []
        start = end = 0
        for number in self._numbers(rank):
            if self.starts[number] != end:
                found.append(range(start, end))
                start = self.starts[number]
            end = self.ends[number]
        found.append(range(start, end))
        return tuple(one for one in found if one)

    def local_index(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the pack token of each local token of the rank, int64 ``[num_local_tokens(rank)]``."""
        from .tensors import index_of_ranges

        return index_of_ranges(self.local_ranges(rank), device)

    def shard(self, x: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """Return the rank's tokens of a tensor that holds the whole pack along ``dim``; a copy, differentiable.

        Raises UnsupportedProblemError unless the dimension has as many tokens as the pack.
        """
        from .tensors import shard

        return shard(self, x, rank, dim)

    def unshard(self, locals: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """Return the tensor of the whole pack from those of all ranks, in their order; differentiable.

        Raises UnsupportedProblemError unless there is one tensor a rank with as many tokens along ``dim`` as it holds.
        """
        from .tensors import unshard

        return unshard(self, locals, dim)

    def explain(self, *, conv_width: int = 4, num_value_heads: int = 32, head_dim: int = 128) -> Explanation:
        """Return who holds what and what each fragment needs from others: to print, or to take as JSON.

        ``conv_width`` is the width of the convolution, whose halo is resolved token by token; ``num_value_heads`` HV
        and ``head_dim`` K = V give the bytes of the exchange of states. Raises UnsupportedProblemError for numbers
        below 1.
        """
        from .explain import Explanation

        sizes = {"conv_width": conv_width, "num_value_heads": num_value_heads, "head_dim": head_dim}
        for name, value in sizes.items():
            if not layouts.is_count(value) or value < 1:
                raise UnsupportedProblemError(f"{name}={value!r}; give a positive integer")
        return Explanation(self, **sizes)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw who holds which tokens, one row a rank; the format follows the path's ending. Needs matplotlib."""
        from .plot import plot

        plot(self, path)

    def digests(self) -> dict[str, str]:
        """Return a digest of each field, to tell in which two partitions differ; the same in every process."""
        return {field.name: _digest(getattr(self, field.name)) for field in fields(self)}

    def digest(self) -> str:
        """Return a digest of the whole content, layout's name included; the same in every process."""
        return _digest(" ".join(self.digests().values()))

    def numbers_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of a rank's fragments, as ``numbers_by_rank`` does, without those of all others."""
        known = self.__dict__.get("numbers_by_rank")
        if known is not None:
            return known[rank]
        if self.order is None:
            return tuple(compress(range(len(self.ranks)), map(rank.__eq__, self.ranks)))
        return tuple(number for number in self.order if self.ranks[number] == rank)

    def _numbers(self, rank: int) -> tuple[int, ...]:
        self._check_rank(rank)
        return self.numbers_by_rank[rank]

    def _check_rank(self, rank: int) -> None:
        if not layouts.is_count(rank) or rank >= self.world_size:
            raise UnsupportedProblemError(f"rank={rank!r}; give one of the {self.world_size} ranks, counted from 0")

    def __repr__(self) -> str:
        return (
            f"<Partition {self.layout}: {self.num_tokens} tokens in {self.num_documents} documents on "
            f"{self.world_size} ranks>"
        )

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _checked(cu_seqlens: object, world_size: object) -> tuple[int, ...]:
    layouts.check_world_size(world_size)
    return boundaries_from(cu_seqlens)


def _digest(value: object) -> str:
    content = array("q", value).tobytes() if isinstance(value, tuple) else repr(value).encode()
    return blake2b(content, digest_size=16).hexdigest()
