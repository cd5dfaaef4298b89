"""``causal_conv1d`` of one rank: each span is a document whose initial state is its halo.

Halos are fp32, which holds every token exactly. Only the first W - 1 tokens of a span need its halo: while halos are
exchanged, all tokens are convolved as if there were none, and then those few again.

Backward, the gradients of a halo's slots go to the ranks with their tokens, which add them in fp32, in a fixed order,
before they round the tokens' gradients: they enter the kernel as the gradient of the span's own final state, that is of
its last W - 1 tokens. The gradient of a halo depends on the first W - 1 tokens of its span only, so that a first launch
on these alone gives what is to be sent.

Several convolutions of the same tokens share an exchange and all launches, those on first tokens with their channels
side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..ops.conv import ConvInputs, conv_backward, conv_backward_together, conv_forward, conv_forward_together
from .channel import Exchange
from .halo_tables import HaloTables, Sum, halo_tables
from .states import exchange

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

    def states(self, size: int) -> torch.Tensor:
        """Return zeros ``[size, D, W - 1]`` in fp32."""
        return self.x.new_zeros((size, self.x.shape[1], self.reach), dtype=torch.float32)


class ConvOutputs(NamedTuple):
    """y ``[T, D]``, and the final states of the documents that end here, zeros for others; None if not wanted."""

    y: torch.Tensor
    final_state: torch.Tensor | None


class ConvGradients(NamedTuple):
    """Gradients of ``ConvTensors``, None where the input is absent."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    initial_state: torch.Tensor | None


class _Group:
    """Convolutions with their channels side by side: as many taps each, and all with a bias and states, or none."""

    def __init__(self, ctx: KcpContext, all_tensors: Sequence[ConvTensors], use_silu: bool) -> None:
        first = all_tensors[0]
        self.all, self.use_silu, self.reach = all_tensors, use_silu, first.reach
        self.with_state = first.initial_state is not None
        self.tables = halo_tables(ctx, first.weight.shape[1], self.with_state, first.x.device)
        self.channels = [one.x.shape[1] for one in all_tensors]

    def label(self, ctx: KcpContext, what: str) -> str:
        """Name an exchange by all that ranks must have alike: others' messages are never taken for it."""
        width, count = self.reach + 1, len(self.all)
        return ctx.next_label(f"{what} of width {width}, initial states: {self.with_state}, convolutions: {count}")

    def inputs(self, one: ConvTensors) -> ConvInputs:
        """All tokens of a convolution, nothing before entered spans."""
        state = None if one.initial_state is None else _entering(self.tables, one)
        return ConvInputs(one.x, one.weight, one.bias, state, self.tables.cu_seqlens, False, self.use_silu)

    def heads(self, halo: torch.Tensor) -> ConvInputs:
        """The first tokens of entered spans, as a pack."""
        weight, bias = (_side_by_side([one[field] for one in self.all], 0) for field in (1, 2))
        x = self.at(self.tables.head_tokens, [one.x for one in self.all])
        return ConvInputs(x, weight, bias, halo, self.tables.head_cu_seqlens, False, self.use_silu)

    def at(self, tokens: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return some tokens of ``[T, D]`` each: ``[n, sum of D]``."""
        # Not index_select, whose kernel takes 9 us for 21 rows of 4,096 channels on an H200, where this takes 2.
        return _side_by_side([one[tokens] for one in tensors], 1)

    def each(self, joined: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each convolution's channels, dimension 1 of a tensor."""
        return joined.split(self.channels, 1)


def _side_by_side(tensors: Sequence[torch.Tensor | None], dim: int) -> torch.Tensor | None:
    return tensors[0] if len(tensors) == 1 or tensors[0] is None else torch.cat(tensors, dim)


def _states_of(rows: torch.Tensor, reach: int) -> torch.Tensor:
    """Rows ``[n (W - 1), D]`` as states ``[n, D, W - 1]``, contiguous."""
    return rows.unflatten(0, (rows.shape[0] // reach, reach)).transpose(1, 2).contiguous()


def _add(target: torch.Tensor, rows: torch.Tensor, sums: Sequence[Sum]) -> None:
    for one in sums:
        target[one.slots] += rows[one.rows]


# ---- forward ---------------------------------------------------------------------------------------------------------


def parallel_conv_forward(
    ctx: KcpContext, all_tensors: Sequence[ConvTensors], use_silu: bool, output_final_state: bool
) -> tuple[list[ConvOutputs], torch.Tensor]:
    """Return what convolutions of the same tokens give, and their halos ``[entered, sum of D, W - 1]``, fp32."""
    group = _Group(ctx, all_tensors, use_silu)
    finish = _start_halo(ctx, group, group.label(ctx, "conv forward"))
    found = _forward(group, ctx.num_documents if output_final_state else None)
    halo = finish()
    if halo.shape[0]:
        _put_heads(group, halo, found, output_final_state)
    if not output_final_state:
        return found, halo
    dtypes = ((one.x if one.initial_state is None else one.initial_state).dtype for one in all_tensors)
    return [ConvOutputs(one.y, one.final_state.to(dtype)) for one, dtype in zip(found, dtypes)], halo


def _start_halo(ctx: KcpContext, group: _Group, label: str) -> Callable[[], torch.Tensor]:
    """Give others the ends of spans and take those before one's own; the function returned waits, and gives halos."""
    tables, reach = group.tables, group.reach
    shape = (tables.entered.shape[0], sum(group.channels), reach)
    halo = group.all[0].x.new_zeros(shape, dtype=torch.float32)
    if not tables.shares:
        return lambda: halo
    rows = group.at(tables.tokens, [one.x for one in group.all]).float()
    if tables.state_rows.shape[0]:
        documents, slots = tables.state_slots
        states = _side_by_side([one.initial_state[documents, :, slots].float() for one in group.all], 1)
        rows = rows.new_empty((tables.sent.end, rows.shape[1])).index_copy_(0, tables.token_rows, rows)
        rows.index_copy_(0, tables.state_rows, states)
    arrived = rows.new_empty((tables.received.end, rows.shape[1]))
    under_way = exchange(ctx.channel, tables.sent.views(rows), tables.received.views(arrived), label)

    def finish() -> torch.Tensor:
        under_way.wait()
        if tables.received.end:
            halo.transpose(1, 2)[tables.filled] = arrived
        return halo

    return finish


def _forward(group: _Group, num_documents: int | None) -> list[ConvOutputs]:
    """Convolve the spans as documents: first spans with their initial states, entered ones as if nothing were before.

    Final states are returned in fp32, where the number of documents is given.
    """
    inputs = [group.inputs(one) for one in group.all]
    if num_documents is None and not group.with_state and inputs[0].num_tokens:
        return [ConvOutputs(y, None) for y in conv_forward_together(inputs)]
    return [_forward_with_states(group.tables, *pair, num_documents) for pair in zip(inputs, group.all)]


def _forward_with_states(
    tables: HaloTables, inputs: ConvInputs, one: ConvTensors, num_documents: int | None
) -> ConvOutputs:
    y, final = conv_forward(inputs, output_final_state=num_documents is not None)
    if num_documents is None:
        return ConvOutputs(y, None)
    final_state = one.states(num_documents)
    final_state[tables.last_documents] = final[tables.last_spans].float()
    return ConvOutputs(y, final_state)


def _entering(tables: HaloTables, one: ConvTensors) -> torch.Tensor:
    """What is before each span ``[spans, D, W - 1]``: initial states of the documents that begin here, else zeros."""
    state = one.states(tables.cu_seqlens.shape[0] - 1)
    if one.initial_state is not None:
        state[tables.first_spans] = one.initial_state[tables.first_documents].float()
    return state


def _put_heads(group: _Group, halo: torch.Tensor, found: Sequence[ConvOutputs], with_final_state: bool) -> None:
    """Convolve the first tokens of entered spans behind their halos, and put them where they belong."""
    tables = group.tables
    # Only spans that are shorter than a halo hand a part of it on.
    with_final_state = with_final_state and tables.short_entered.shape[0] > 0
    y, final = conv_forward(group.heads(halo), output_final_state=with_final_state)
    for one, part in zip(found, group.each(y)):
        one.y.index_copy_(0, tables.head_tokens, part)
    if with_final_state:
        for one, part in zip(found, group.each(final[tables.short_entered])):
            one.final_state[tables.short_documents] = part


# ---- backward --------------------------------------------------------------------------------------------------------


def parallel_conv_backward(
    ctx: KcpContext,
    all_dy: Sequence[torch.Tensor],
    dfinal_state: torch.Tensor | None,
    halo: torch.Tensor,
    all_tensors: Sequence[ConvTensors],
    use_silu: bool,
) -> list[ConvGradients]:
    """Return the gradients of convolutions of the same tokens. ``dfinal_state`` is that of one convolution alone."""
    group = _Group(ctx, all_tensors, use_silu)
    tables, label = group.tables, group.label(ctx, "conv backward")
    arrived = halo.new_empty((tables.sent.end, halo.shape[1]))
    under_way = _start_gradient(ctx, group, all_dy, dfinal_state, halo, arrived, label) if tables.shares else None
    # What needs nothing of others is launched before the wait.
    states = [_entering(tables, one) for one in all_tensors]
    for state, part in zip(states, group.each(halo)):
        state[tables.entered] = part
    end = halo.new_zeros(((tables.cu_seqlens.shape[0] - 1) * group.reach, halo.shape[1]))
    if under_way is not None:
        under_way.wait()
    _add(end, arrived, tables.to_tokens)
    ends = [_states_of(part, group.reach) for part in group.each(end)]
    if dfinal_state is not None:
        ends[0][tables.last_spans] += dfinal_state[tables.last_documents].float()
    many = [
        ConvInputs(one.x, one.weight, one.bias, state, tables.cu_seqlens, False, use_silu)
        for one, state in zip(all_tensors, states)
    ]
    found = []
    for one, gradients, others in zip(all_tensors, conv_backward_together(many, all_dy, ends), group.each(arrived)):
        *own, start = gradients
        dinitial = None if one.initial_state is None else _initial_gradient(ctx, tables, one, start, others)
        found.append(ConvGradients(*own, dinitial))
    return found


def _start_gradient(
    ctx: KcpContext, group: _Group, all_dy, dfinal_state, halo: torch.Tensor, arrived: torch.Tensor, label: str
) -> Exchange:
    """Start to send back the gradient of the entered spans' halos, which the first tokens of each give."""
    tables = group.tables
    rows = halo.new_empty((0, halo.shape[1]))
    if halo.shape[0]:
        end = None
        if dfinal_state is not None:
            # A last span that is shorter than a halo hands a part of its final state on to its halo.
            end = torch.zeros_like(halo)
            end[tables.short_entered] = dfinal_state[tables.short_documents].float()
        dhalo = conv_backward(group.heads(halo), group.at(tables.head_tokens, all_dy), end)[3]
        rows = dhalo.transpose(1, 2)[tables.filled]
    return exchange(ctx.channel, tables.received.views(rows), tables.sent.views(arrived), label)


def _initial_gradient(
    ctx: KcpContext, tables: HaloTables, one: ConvTensors, start: torch.Tensor, arrived: torch.Tensor
) -> torch.Tensor:
    """The gradient of initial states: of what is before the spans that begin documents, and what other ranks add."""
    dinitial = one.states(ctx.num_documents)
    dinitial[tables.first_documents] = start[tables.first_spans]
    rows = dinitial.transpose(1, 2).flatten(0, 1)
    _add(rows, arrived, tables.to_states)
    return _states_of(rows, one.reach).to(one.initial_state.dtype)
