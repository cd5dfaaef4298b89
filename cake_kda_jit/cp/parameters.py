"""The one reduction that a step needs: gradients of parameters, which are each rank's part until then."""

from __future__ import annotations

import torch

from ..errors import UnsupportedProblemError
from .context import KcpContext


@torch.no_grad()
def reduce_parameter_gradients(ctx: KcpContext, *parameters: torch.Tensor) -> None:
    """Replace each parameter's ``grad`` by the sum of all ranks', the same bits on all of them. Collective.

    Sums are taken in fp32 (fp64 for fp64 parameters) in the order of the ranks; a gradient that a rank lacks counts as
    0, and every parameter has one afterwards; frozen ones, without ``requires_grad``, are left as they are. Call it
    once a step, with the same parameters in the same order on all ranks, and not under DDP or FSDP over these ranks,
    which reduce by themselves.

    Raises UnsupportedProblemError for what is no parameter of one device or has a sparse gradient, CommunicationError
    if a rank is missing.
    """
    if not isinstance(ctx, KcpContext):
        raise UnsupportedProblemError(f"ctx is {type(ctx).__name__}; give a KcpContext")
    for index, parameter in enumerate(parameters):
        if not isinstance(parameter, torch.Tensor) or not parameter.is_leaf or not parameter.is_floating_point():
            raise UnsupportedProblemError(
                f"parameters[{index}], of type {type(parameter).__name__}, is no leaf tensor of a floating dtype; give "
                "parameters one by one, as in reduce_parameter_gradients(ctx, *module.parameters())"
            )
        if parameter.device != parameters[0].device:
            raise UnsupportedProblemError(
                f"parameters[{index}] is on {parameter.device}, the first one on {parameters[0].device}; reduce those "
                "of each device in a call of their own"
            )
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UnsupportedProblemError(
                f"the gradient of parameters[{index}] is {parameter.grad.layout}; only dense ones are summed: make it "
                "dense, for embeddings with sparse=False"
            )
    # A gradient of 0 is not the same as none: an optimizer would decay a frozen weight.
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if not parameters:
        return
    ctx.prepare(parameters[0].device)
    for wide in (torch.float32, torch.float64):
        some = [p for p in parameters if torch.promote_types(p.dtype, torch.float32) == wide]
        if some:
            _reduce(ctx, some, wide)


def _reduce(ctx: KcpContext, parameters: list[torch.Tensor], wide: torch.dtype) -> None:
    """Each rank sums one share of all values and sends the sum to all: twice the values in bytes, for any W."""
    sizes = [parameter.numel() for parameter in parameters]
    share = -(-sum(sizes) // ctx.world_size)
    flat = parameters[0].new_zeros(share * ctx.world_size, dtype=wide)
    for parameter, part in zip(parameters, flat[: sum(sizes)].split(sizes)):
        if parameter.grad is not None:
            part.copy_(parameter.grad.flatten())
    shares = flat.view(ctx.world_size, share)
    label = ctx.next_label(f"gradients of {len(parameters)} parameters")
    others = [rank for rank in range(ctx.world_size) if rank != ctx.rank]
    parts = torch.empty_like(shares)
    parts[ctx.rank] = shares[ctx.rank]
    ctx.channel.start({r: shares[r] for r in others}, {r: parts[r] for r in others}, f"{label}, parts").wait()
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    sums = torch.empty_like(shares)
    sums[ctx.rank] = total
    ctx.channel.start({r: total for r in others}, {r: sums[r] for r in others}, f"{label}, sums").wait()
    ctx.channel.settle()
    for parameter, part in zip(parameters, sums.flatten()[: sum(sizes)].split(sizes)):
        value = part.view(parameter.shape).to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = value.clone()
        else:
            parameter.grad.copy_(value)
