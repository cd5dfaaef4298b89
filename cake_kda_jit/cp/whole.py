"""Tokens of all ranks on each: the collective form of ``Partition.unshard``, and its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import UnsupportedProblemError
from .context import KcpContext
from .tensors import check_length

if TYPE_CHECKING:
    from collections.abc import Callable


def gather(x_local: torch.Tensor, ctx: KcpContext, dim: int = 1) -> torch.Tensor:
    """Return the tensor of the whole pack on every rank, from each rank's tokens along ``dim``. Collective.

    Differentiable: the loss is the sum of the ranks' losses, so a rank's tokens get the sum, in fp32 and in the order
    of the ranks, of the gradients that all ranks have for them. A loss that every rank computes alike on the whole
    counts W times: divide it by the number of ranks. The other dimensions and the dtype must be the same on all ranks.

    Raises UnsupportedProblemError for a tensor of other tokens, CommunicationError if a rank does not take part.
    """
    from .library import OPERATORS

    if not isinstance(ctx, KcpContext):
        raise UnsupportedProblemError(f"ctx is {type(ctx).__name__}; give a KcpContext")
    check_length("x_local", x_local, dim, ctx.num_local_tokens, f"rank {ctx.rank} holds")
    ctx.prepare(x_local.device)
    sizes = (ctx.partition.num_tokens, ctx.num_local_tokens)
    return OPERATORS.kcp_gather(x_local, ctx.handle, dim % x_local.dim(), *sizes)


def gather_tokens(ctx: KcpContext, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Send a rank's tokens to all, and put all ranks' in the order of the pack."""
    x = x.clone(memory_format=torch.contiguous_format)

    def empty(rank: int) -> torch.Tensor:
        shape = list(x.shape)
        shape[dim] = ctx.partition.num_local_tokens(rank)
        return x.new_empty(shape)

    label = ctx.next_label(f"gather of {x.dtype}")
    parts = _all_to_all(ctx, lambda peer: x, {rank: empty(rank) for rank in range(ctx.world_size)}, label)
    return ctx.partition.unshard(parts, dim)


def scatter_sum(ctx: KcpContext, dx: torch.Tensor, dim: int) -> torch.Tensor:
    """Send each rank its tokens' gradients, and add those received in the order of the ranks, in fp32 or wider."""
    shape = list(dx.shape)
    shape[dim] = ctx.num_local_tokens
    label = ctx.next_label(f"gradient of a gather of {dx.dtype}")
    receives = {rank: dx.new_empty(shape) for rank in range(ctx.world_size)}
    parts = _all_to_all(ctx, lambda peer: ctx.partition.shard(dx, peer, dim).contiguous(), receives, label)
    wide = torch.promote_types(dx.dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(dx.dtype)


def _all_to_all(
    ctx: KcpContext, send: Callable[[int], torch.Tensor], receives: dict[int, torch.Tensor], label: str
) -> list[torch.Tensor]:
    """Exchange one tensor with every rank; returns what came from each, in their order."""
    own = send(ctx.rank)
    others = [rank for rank in range(ctx.world_size) if rank != ctx.rank]
    sends = {rank: send(rank) for rank in others}
    ctx.channel.start(sends, {rank: receives[rank] for rank in others}, label).wait()
    return [own if rank == ctx.rank else receives[rank] for rank in range(ctx.world_size)]
