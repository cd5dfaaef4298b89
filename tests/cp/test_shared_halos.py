"""Halos of several convolutions in one exchange, hidden behind the convolutions: the same bits, in the same order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cake_kda_jit import (
    KcpContext,
    Partition,
    PlanMismatchError,
    UnsupportedProblemError,
    VirtualGroup,
    causal_conv1d,
    run_virtual,
)
from cake_kda_jit.bench.cp_work import LoopbackChannel, LoopbackGroup
from cake_kda_jit.cp import conv
from cake_kda_jit.cp.channel import Channel, Exchange
from cake_kda_jit.layers import KimiDeltaAttention
from cake_kda_jit.ops.parallel import short_convolutions

from .ranks import (
    CHANNELS,
    LAYOUTS,
    ConvProblem,
    Found,
    assert_same_bits,
    boundaries,
    conv_problem,
    convolution,
    partitions,
    run_ranks,
    three_convolutions,
)

SETTINGS = settings(
    max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LENGTHS = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 30)), min_size=1, max_size=6)


def on_ranks(partition: Partition, **how) -> list[dict]:
    ctx = KcpContext(partition, VirtualGroup(partition.world_size))
    return run_virtual(ctx, lambda rank, own: three_convolutions(own, **how)).results


@SETTINGS
@given(partition=partitions(LENGTHS), width=st.integers(2, 4), dtype=st.sampled_from((torch.bfloat16, torch.float32)))
def test_one_exchange_has_the_bits_of_one_each(partition, width, dtype, nan_poison):
    apart = on_ranks(partition, together=False, width=width, dtype=dtype)
    together = on_ranks(partition, together=True, width=width, dtype=dtype)
    for mine, yours in zip(together, apart):
        assert_same_bits(mine, yours)


# ---- with nothing hidden, and nothing exchanged ----------------------------------------------------------------------


class Spans:
    """A rank's spans as documents, with what is before them in fp32, read from the whole pack."""

    def __init__(self, ctx: KcpContext, problem: ConvProblem, rank: int) -> None:
        self.problem, self.reach = problem, problem.weight.shape[1] - 1
        self.all = ctx.parallel_plan.spans.of_rank(rank)
        self.cu = torch.tensor(boundaries([span.num_tokens for span in self.all]))
        self.x, self.dy = (ctx.partition.shard(one, rank) for one in (problem.x, problem.dy))
        self.halo = torch.zeros(len(self.all), problem.x.shape[2], self.reach)
        for number, span in enumerate(self.all):
            for slot in range(self.reach):
                self.halo[number, :, slot] = self.before(span.document, span.start - self.reach + slot)

    def before(self, document: int, token: int) -> torch.Tensor:
        """A token, or a slot of the document's initial state."""
        first, state = self.problem.cu[document], self.problem.initial_state
        if token >= first:
            return self.problem.x[0, token].float()
        if state is None:
            return torch.zeros(self.problem.x.shape[2])
        return state[document, :, token - first + self.reach].float()

    def run(self, dfinal: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """y, final states, and the gradients of x and of what is before each span."""
        x, halo = (one.detach().clone().requires_grad_() for one in (self.x, self.halo))
        weight, bias = self.problem.weight, self.problem.bias
        y, final = causal_conv1d(x, weight, bias, initial_state=halo, output_final_state=True, cu_seqlens=self.cu)
        torch.autograd.backward([y, final], [self.dy, dfinal])
        return y.detach(), final.detach(), x.grad, halo.grad

    def own_gradient(self) -> torch.Tensor:
        """The gradient of final states, where documents end."""
        found = torch.zeros_like(self.halo)
        for number, span in enumerate(self.all):
            if span.end == self.problem.cu[span.document + 1]:
                found[number] = self.problem.dfinal_state[span.document].float()
        return found


@SETTINGS
@given(partition=partitions(LENGTHS), width=st.integers(2, 4), with_state=st.booleans())
def test_hidden_exchanges_change_no_bit(partition, width, with_state, nan_poison):
    """Each span is convolved once, behind its halo; what others ask of its last tokens is in fp32 before they round."""
    problem = conv_problem(partition.cu_seqlens, width=width, with_state=with_state, dtype=torch.bfloat16, channels=5)
    found = convolution(problem, partition)
    ctx = KcpContext(partition, VirtualGroup(partition.world_size))
    everybody = [Spans(ctx, problem, rank) for rank in range(partition.world_size)]
    ranks = [one for one in everybody if one.all]
    asked: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for one in ranks:
        *_, dhalo = one.run(one.own_gradient())
        for span, gradient in zip(one.all, dhalo):
            for slot in range(one.reach):
                asked.setdefault(span.start - one.reach + slot, []).append((span.start, gradient[:, slot]))
    for one, mine in zip(everybody, found.ranks):
        if not one.all:
            continue
        end = torch.zeros_like(one.halo)
        for number, span in enumerate(one.all):
            for slot in range(one.reach):
                token = span.end - one.reach + slot
                if token < span.start:
                    continue
                for start, gradient in sorted(asked.get(token, []), key=lambda pair: pair[0]):
                    if span.end <= start < partition.cu_seqlens[span.document + 1]:
                        end[number, :, slot] += gradient
        y, final, dx, _ = one.run(end + one.own_gradient())
        assert torch.equal(mine["y"], y)
        assert torch.equal(mine["dx"], dx)
        for number, span in enumerate(one.all):
            if span.end == partition.cu_seqlens[span.document + 1]:
                assert torch.equal(mine["final_state"][span.document], final[number].to(mine["final_state"].dtype))


# ---- what is launched while an exchange is under way -----------------------------------------------------------------


class RecordingGroup(LoopbackGroup):
    """Ranks that never meet, and a log of what one of them does."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.events: list[str] = []

    def channel(self, rank: int) -> Channel:
        return RecordingChannel(self, rank)


class RecordingChannel(LoopbackChannel):
    def _start(self, sends, receives, label) -> Exchange:
        self.group.events.append("start")
        return Recorded(super()._start(sends, receives, label), self.group.events)


class Recorded(Exchange):
    def __init__(self, inner: Exchange, events: list[str]) -> None:
        self._inner, self._events = inner, events

    def wait(self) -> None:
        self._events.append("wait")
        self._inner.wait()


def test_a_halo_is_under_way_while_all_tokens_are_convolved(monkeypatch, nan_poison):
    """Rank 1 of 3 is entered and left. Its 20 tokens come first, then its first 3; backward its first 3 come first."""
    group = RecordingGroup(3)

    def recorded(function):
        def launch(inputs, *rest, **others):
            many = inputs if isinstance(inputs, list) else [inputs]
            channels = [one.x.shape[-1] for one in many]
            group.events.append(f"{many[0].num_tokens} tokens of {channels}")
            return function(inputs, *rest, **others)

        return launch

    for name in ("conv_forward", "conv_forward_together", "conv_backward", "conv_backward_together"):
        monkeypatch.setattr(conv, name, recorded(getattr(conv, name)))
    ctx = KcpContext(Partition.contiguous([0, 60], 3), group).of_rank(1)
    rows = [torch.randn(1, 20, channels, requires_grad=True) for channels in CHANNELS]
    outputs = short_convolutions(rows, [torch.randn(channels, 4) for channels in CHANNELS], ctx)
    first_tokens, all_tokens = f"3 tokens of {[sum(CHANNELS)]}", f"20 tokens of {[*CHANNELS]}"
    assert group.events == ["start", all_tokens, "wait", first_tokens]
    group.events.clear()
    torch.autograd.backward(list(outputs), [torch.randn_like(one) for one in outputs])
    assert group.events == [first_tokens, "start", "wait", all_tokens]


# ---- in a layer ------------------------------------------------------------------------------------------------------


def layer_on_ranks(partition: Partition, hook: bool) -> Found:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(32, num_heads=1, head_dim=64, num_value_heads=2, kernel_dtype=torch.float32)
    x = torch.randn(1, partition.cu_seqlens[-1], 32)
    if hook:
        layer.k_conv1d.register_forward_hook(lambda *_: None)

    def call(ctx: KcpContext) -> dict:
        local = partition.shard(x, ctx.rank).clone().requires_grad_()
        before = ctx.channel.num_exchanges
        y = layer(local, cp_context=ctx)
        forward = ctx.channel.num_exchanges - before
        gradients = torch.autograd.grad(y.square().sum(), [local, *layer.parameters()])
        named = {f"gradient {n}": one for n, one in enumerate(gradients[1:])}
        return {"y": y.detach(), "dx": gradients[0], "exchanges": torch.tensor(forward), **named}

    return run_ranks(partition, call)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_exchanges_once_for_its_convolutions(layout, nan_poison):
    partition = getattr(Partition, layout)(boundaries([40, 3, 90]), 2)
    together, apart = (layer_on_ranks(partition, hook) for hook in (False, True))
    for mine, yours in zip(together.ranks, apart.ranks):
        assert yours.pop("exchanges") - mine.pop("exchanges") == 2
        assert_same_bits(mine, yours)


def test_what_cannot_share_an_exchange_is_told_or_refused():
    ctx = KcpContext(Partition.contiguous([0, 10], 1), VirtualGroup(1)).of_rank(0)
    rows, weights = [torch.zeros(1, 10, 4)] * 3, [torch.zeros(4, 4)] * 3
    assert short_convolutions(rows, [torch.zeros(4, 3), *weights[1:]], ctx) is None, "another width"
    assert short_convolutions([rows[0].bfloat16(), *rows[1:]], weights, ctx) is None, "another dtype"
    with pytest.raises(PlanMismatchError, match="x has 9 tokens; rank 0 of this partition holds 10"):
        short_convolutions([*rows[:2], torch.zeros(1, 9, 4)], weights, ctx)
    with pytest.raises(UnsupportedProblemError, match="cu_seqlens is given beside cp_context"):
        short_convolutions(rows, weights, ctx, cu_seqlens=torch.tensor([0, 10]))
