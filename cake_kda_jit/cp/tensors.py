"""Tensors of a whole pack and tensors of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import UnsupportedProblemError

if TYPE_CHECKING:
    from .partition import Partition


def index_of_ranges(ranges: Sequence[range], device: torch.device | str) -> torch.Tensor:
    """Return all numbers of the ranges, one range after the other, int64."""
    # Two numbers a range go to the device, not one a token; pinned, or the host would wait for all that is before them.
    numbers = torch.tensor(
        [[one.start for one in ranges], [len(one) for one in ranges]], dtype=torch.int64, device="cpu"
    )
    if torch.device(device).type == "cuda":  # not by pin_memory(), which tensors without data do not have
        numbers = torch.empty_like(numbers, pin_memory=True).copy_(numbers)
    starts, lengths = numbers.reshape(2, len(ranges)).to(device, non_blocking=True)
    total = sum(map(len, ranges))
    shifts = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(total, device=device) + shifts.repeat_interleave(lengths, output_size=total)


def shard(partition: Partition, x: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
    """See ``Partition.shard``."""
    check_length("x", x, dim, partition.num_tokens, "the pack has")
    return x.index_select(dim, partition.local_index(rank, x.device))


def unshard(partition: Partition, locals: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """See ``Partition.unshard``."""
    if len(locals) != partition.world_size:
        raise UnsupportedProblemError(
            f"{len(locals)} tensors were given for {partition.world_size} ranks; give one for each, in their order"
        )
    for rank, x in enumerate(locals):
        check_length(f"locals[{rank}]", x, dim, partition.num_local_tokens(rank), f"rank {rank} holds")
    device = locals[0].device
    held = torch.cat([partition.local_index(rank, device) for rank in range(partition.world_size)])
    places = torch.empty_like(held)
    places[held] = torch.arange(len(held), device=device)
    return torch.cat(list(locals), dim).index_select(dim, places)


def check_length(name: str, x: torch.Tensor, dim: int, tokens: int, who: str) -> None:
    """Raise UnsupportedProblemError unless a tensor has this many tokens along a dimension."""
    if not isinstance(x, torch.Tensor):
        raise UnsupportedProblemError(f"{name} is {type(x).__name__}; give a tensor")
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != tokens:
        raise UnsupportedProblemError(
            f"{name} has shape {list(x.shape)} and tokens along dim={dim}; {who} {tokens}: give the tensor of all of "
            "them, or the dimension that holds them"
        )
