"""A rank's halos as indices on a device, made once per context, width and device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from .halo import HaloPlan
from .spans import Role
from .states import Layout

if TYPE_CHECKING:
    from .context import KcpContext

Tensors = Callable[[Iterable[int]], torch.Tensor]
"""Makes an index of numbers."""


class Sum(NamedTuple):
    """Rows of a pool that are added to slots, no slot twice; a slot's number counts through all spans or documents."""

    rows: torch.Tensor
    slots: torch.Tensor


class HaloTables(NamedTuple):
    """A rank's halos of one width on a device.

    ``entered`` are the spans with a halo. Forward, message rows ``token_rows`` are the local tokens ``tokens``, and
    ``state_rows`` are ``(documents, slots)`` of the initial states; received row i is ``filled[.][i]``, an entered span
    and a slot of it. ``shares``: some document is on several ranks. Backward the same messages go the other way, and
    are added to tokens and states sum by sum.
    ``head_*`` are the first W - 1 tokens of each entered span, as a pack; of the last spans that are shorter,
    ``short_entered`` are the numbers in it and ``short_documents`` the documents.
    """

    cu_seqlens: torch.Tensor
    shares: bool
    entered: torch.Tensor
    sent: Layout
    token_rows: torch.Tensor
    tokens: torch.Tensor
    state_rows: torch.Tensor
    state_slots: tuple[torch.Tensor, torch.Tensor]
    received: Layout
    filled: tuple[torch.Tensor, torch.Tensor]
    to_tokens: tuple[Sum, ...]
    to_states: tuple[Sum, ...]
    head_tokens: torch.Tensor
    head_cu_seqlens: torch.Tensor
    short_entered: torch.Tensor
    short_documents: torch.Tensor
    first_spans: torch.Tensor
    first_documents: torch.Tensor
    last_spans: torch.Tensor
    last_documents: torch.Tensor


def halo_tables(ctx: KcpContext, width: int, with_state: bool, device: torch.device) -> HaloTables:
    """Return a context's halos for a convolution of ``width`` taps; ``with_state``: documents have initial states."""
    return ctx.cached(("halo", width, with_state, device), lambda: _make_tables(ctx, width, with_state, device))


def _sums(sources: Sequence[tuple], reach: int, tensor: Tensors) -> tuple[Sum, ...]:
    """What message rows add to, in the order of layers; ``sources`` are (row, (span, token, slot, layer))."""
    layers: dict[int, list[tuple[int, int]]] = {}
    for row, (span, _, slot, layer) in sources:
        layers.setdefault(layer, []).append((row, span * reach + slot))
    return tuple(Sum(*map(tensor, zip(*layers[layer]))) for layer in sorted(layers))


def _make_tables(ctx: KcpContext, width: int, with_state: bool, device: torch.device) -> HaloTables:
    def tensor(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device="cpu").to(device)

    plan: HaloPlan = ctx.parallel_plan.halo(ctx.rank, width, with_state)
    reach = width - 1
    cu, spans = ctx.partition.cu_seqlens, ctx.parallel_plan.spans.of_rank(ctx.rank)
    starts = ctx.parallel_plan.spans.local_starts(ctx.rank)
    entered = [number for number, span in enumerate(spans) if span.start > cu[span.document]]
    place = {number: index for index, number in enumerate(entered)}
    heads = [min(reach, spans[number].num_tokens) for number in entered]
    short = [n for n in entered if spans[n].role is Role.LAST and spans[n].num_tokens < reach]
    first = [n for n, span in enumerate(spans) if span.role in (Role.FIRST, Role.WHOLE)]
    last = [n for n, span in enumerate(spans) if span.role in (Role.LAST, Role.WHOLE)]
    sources = [source for peer in sorted(plan.sends) for source in plan.sends[peer]]
    tokens = [(row, source[1:]) for row, source in enumerate(sources) if source[2] >= 0]
    states = [(row, source[1:]) for row, source in enumerate(sources) if source[2] < 0]
    filled = [slot[1:] for peer in sorted(plan.receives) for slot in plan.receives[peer]]
    return HaloTables(
        cu_seqlens=tensor(accumulate((span.num_tokens for span in spans), initial=0)),
        shares=ctx.parallel_plan.needs_exchange,
        entered=tensor(entered),
        sent=Layout({peer: len(some) for peer, some in plan.sends.items()}),
        token_rows=tensor(row for row, _ in tokens),
        tokens=tensor(token for _, (_, token, *_) in tokens),
        state_rows=tensor(row for row, _ in states),
        state_slots=(tensor(span for _, (span, *_) in states), tensor(slot for _, (_, _, slot, _) in states)),
        received=Layout({peer: len(slots) for peer, slots in plan.receives.items()}),
        filled=(tensor(place[span] for span, _ in filled), tensor(slot for _, slot in filled)),
        to_tokens=_sums(tokens, reach, tensor),
        to_states=_sums(states, reach, tensor),
        head_tokens=tensor(starts[number] + t for number, length in zip(entered, heads) for t in range(length)),
        head_cu_seqlens=tensor(accumulate(heads, initial=0)),
        short_entered=tensor(place[number] for number in short),
        short_documents=tensor(spans[number].document for number in short),
        first_spans=tensor(first),
        first_documents=tensor(spans[number].document for number in first),
        last_spans=tensor(last),
        last_documents=tensor(spans[number].document for number in last),
    )
