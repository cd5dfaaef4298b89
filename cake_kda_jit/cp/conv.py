"""``causal_conv1d`` of one rank: each span is a document whose initial state is its halo.

Halos are fp32, which holds every token exactly. Backward, the gradients of a halo's slots go to the ranks with their
tokens, which add them in fp32, in a fixed order, before they round the tokens' gradients: they enter the kernel as the
gradient of the span's own final state, that is of its last W - 1 tokens. The gradient of a halo depends on the first
W - 1 tokens of its span only, so that a first launch on these alone gives what is to be sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..ops.conv import ConvInputs, conv_backward, conv_forward
from .halo import HaloPlan
from .spans import Role
from .states import Layout, exchange

if TYPE_CHECKING:
    from .context import KcpContext


class ConvTensors(NamedTuple):
    """x ``[T, D]``, weight ``[D, W]``, bias ``[D]`` or None, initial_state ``[N, D, W - 1]`` or None."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    initial_state: torch.Tensor | None

    @property
    def reach(self) -> int:
        """W - 1."""
        return self.weight.shape[1] - 1

    def rows(self, *sizes: int) -> torch.Tensor:
        """Return zeros ``[*sizes, D]`` in fp32."""
        return self.x.new_zeros((*sizes, self.x.shape[1]), dtype=torch.float32)

    def states(self, size: int) -> torch.Tensor:
        """Return zeros ``[size, D, W - 1]`` in fp32."""
        return self.x.new_zeros((size, self.x.shape[1], self.reach), dtype=torch.float32)


class Sum(NamedTuple):
    """Rows of a pool that are added to slots, no slot twice; a slot's number counts through all spans or documents."""

    rows: torch.Tensor
    slots: torch.Tensor


class HaloTables(NamedTuple):
    """A rank's halos of one width on a device.

    ``entered`` are the spans with a halo. Forward, message rows ``token_rows`` are the local tokens ``tokens``, and
    ``state_rows`` are ``(documents, slots)`` of the initial states; received row i fills slot ``filled[i]`` of the
    entered spans. ``shares``: some document is on several ranks. Backward the same messages go the other way, and are
    added to tokens and states sum by sum.
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
    filled: torch.Tensor
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


def get_tables(ctx: KcpContext, tensors: ConvTensors) -> HaloTables:
    """Return a context's halo tables, made once."""
    width, with_state, device = tensors.weight.shape[1], tensors.initial_state is not None, tensors.x.device
    key = ("halo", width, with_state, device)
    return ctx.cached(
        key, lambda: _make_tables(ctx, ctx.parallel_plan.halo(ctx.rank, width, with_state), width, device)
    )


def _make_tables(ctx: KcpContext, plan: HaloPlan, width: int, device: torch.device) -> HaloTables:
    def tensor(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device="cpu").to(device)

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

    def sums(some) -> tuple[Sum, ...]:
        layers: dict[int, list[tuple[int, int]]] = {}
        for row, (span, _, slot, layer) in some:
            layers.setdefault(layer, []).append((row, span * reach + slot))
        return tuple(Sum(*map(tensor, zip(*layers[layer]))) for layer in sorted(layers))

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
        filled=tensor(
            place[span] * reach + slot for peer in sorted(plan.receives) for _, span, slot in plan.receives[peer]
        ),
        to_tokens=sums(tokens),
        to_states=sums(states),
        head_tokens=tensor(starts[number] + t for number, length in zip(entered, heads) for t in range(length)),
        head_cu_seqlens=tensor(accumulate(heads, initial=0)),
        short_entered=tensor(place[number] for number in short),
        short_documents=tensor(spans[number].document for number in short),
        first_spans=tensor(first),
        first_documents=tensor(spans[number].document for number in first),
        last_spans=tensor(last),
        last_documents=tensor(spans[number].document for number in last),
    )


def _rows_of(states: torch.Tensor) -> torch.Tensor:
    """``[n, D, W - 1]`` as rows ``[n (W - 1), D]``."""
    return states.transpose(1, 2).flatten(0, 1)


def _states_of(rows: torch.Tensor, reach: int) -> torch.Tensor:
    """The inverse of ``_rows_of``, contiguous."""
    return rows.unflatten(0, (-1, reach)).transpose(1, 2).contiguous() if rows.shape[0] else rows.new_empty(
        (0, rows.shape[1], reach)
    )  # fmt: skip


def _inputs(tables: HaloTables, tensors: ConvTensors, halo: torch.Tensor, use_silu: bool) -> ConvInputs:
    """The spans as documents, with halos and the initial states of the documents that begin here."""
    state = tensors.states(tables.cu_seqlens.shape[0] - 1)
    if tensors.initial_state is not None:
        state[tables.first_spans] = tensors.initial_state[tables.first_documents].float()
    state[tables.entered] = halo
    return ConvInputs(tensors.x, tensors.weight, tensors.bias, state, tables.cu_seqlens, False, use_silu)


def _exchange_halo(ctx: KcpContext, tables: HaloTables, tensors: ConvTensors) -> torch.Tensor:
    """Give others the ends of spans and take those before one's own: rows ``[entered (W - 1), D]``, fp32."""
    halo = tensors.rows(tables.entered.shape[0] * tensors.reach)
    label = ctx.next_label(_what("conv forward", tensors))
    if not tables.shares:
        return halo
    rows = tensors.x.index_select(0, tables.tokens).float()
    if tables.state_rows.shape[0]:
        documents, slots = tables.state_slots
        states = tensors.initial_state[documents, :, slots].float()
        rows = rows.new_empty((tables.sent.end, rows.shape[1])).index_copy_(0, tables.token_rows, rows)
        rows.index_copy_(0, tables.state_rows, states)
    arrived = rows.new_empty((tables.received.end, rows.shape[1]))
    exchange(ctx.channel, tables.sent.views(rows), tables.received.views(arrived), label).wait()
    return halo.index_copy_(0, tables.filled, arrived)


def parallel_conv_forward(
    ctx: KcpContext, tensors: ConvTensors, use_silu: bool, output_final_state: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return y ``[T, D]``, the final states of the documents that end here, and the halos for the backward."""
    tables = get_tables(ctx, tensors)
    halo = _states_of(_exchange_halo(ctx, tables, tensors), tensors.reach)
    y, final = conv_forward(_inputs(tables, tensors, halo, use_silu), output_final_state=output_final_state)
    if not output_final_state:
        return y, None, halo
    dtype = tensors.x.dtype if tensors.initial_state is None else tensors.initial_state.dtype
    final_state = tensors.states(ctx.num_documents)
    final_state[tables.last_documents] = final[tables.last_spans]
    return y, final_state.to(dtype), halo


def parallel_conv_backward(
    ctx: KcpContext,
    dy: torch.Tensor,
    dfinal_state: torch.Tensor | None,
    halo: torch.Tensor,
    tensors: ConvTensors,
    use_silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return dx, dweight, dbias and dinitial_state, None where the input is absent."""
    tables = get_tables(ctx, tensors)
    label = ctx.next_label(_what("conv backward", tensors))
    arrived = dy.new_empty((tables.sent.end, dy.shape[1]), dtype=torch.float32)
    if tables.shares:
        rows = _rows_of(_halo_gradient(tables, dy, dfinal_state, halo, tensors, use_silu))
        rows = rows.index_select(0, tables.filled)
        exchange(ctx.channel, tables.received.views(rows), tables.sent.views(arrived), label).wait()

    end = tensors.rows((tables.cu_seqlens.shape[0] - 1) * tensors.reach)
    _add(end, arrived, tables.to_tokens)
    end = _states_of(end, tensors.reach)
    if dfinal_state is not None:
        end[tables.last_spans] += dfinal_state[tables.last_documents].float()
    dx, dweight, dbias, start = conv_backward(_inputs(tables, tensors, halo, use_silu), dy, end)
    if tensors.initial_state is None:
        return dx, dweight, dbias, None
    dinitial = tensors.states(ctx.num_documents)
    dinitial[tables.first_documents] = start[tables.first_spans]
    dinitial = _rows_of(dinitial)
    _add(dinitial, arrived, tables.to_states)
    return dx, dweight, dbias, _states_of(dinitial, tensors.reach).to(tensors.initial_state.dtype)


def _halo_gradient(
    tables: HaloTables, dy: torch.Tensor, dfinal_state, halo: torch.Tensor, tensors: ConvTensors, use_silu: bool
) -> torch.Tensor:
    """The gradient of the entered spans' halos, ``[entered, D, W - 1]``, from the first tokens of each."""
    if halo.shape[0] == 0:
        return halo
    end = None
    if dfinal_state is not None:
        # A last span that is shorter than a halo hands a part of its final state on to its halo.
        end = torch.zeros_like(halo)
        end[tables.short_entered] = dfinal_state[tables.short_documents].float()
    x, dy = (tensor.index_select(0, tables.head_tokens) for tensor in (tensors.x, dy))
    heads = ConvInputs(x, tensors.weight, tensors.bias, halo, tables.head_cu_seqlens, False, use_silu)
    return conv_backward(heads, dy, end)[3]


def _add(target: torch.Tensor, rows: torch.Tensor, sums: Sequence[Sum]) -> None:
    for one in sums:
        target[one.slots] += rows[one.rows]


def _what(what: str, tensors: ConvTensors) -> str:
    """What is exchanged, with all that ranks must have alike: others' messages are never taken for it."""
    return f"{what} of width {tensors.reach + 1}, initial states: {tensors.initial_state is not None}"
