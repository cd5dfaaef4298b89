"""Spans, halos, schedules and traffic against plain searches over all tokens and all ranks."""

from __future__ import annotations

import random
import time
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cake_kda_jit import Partition, UnsupportedProblemError
from cake_kda_jit.cp.plan import ParallelPlan
from cake_kda_jit.cp.schedule import EXCHANGES, WalkSchedule, walking_ranks
from cake_kda_jit.cp.spans import Role

from .ranks import boundaries, partitions

SETTINGS = settings(max_examples=120, derandomize=True, deadline=None)
LENGTHS = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 40)), min_size=1, max_size=6)
PLANS = partitions(LENGTHS).map(ParallelPlan)


def memory_of(partition: Partition, rank: int) -> list[int]:
    """The pack token of each local token."""
    return [token for fragment in partition.fragments(rank) for token in range(fragment.start, fragment.end)]


def document_of(partition: Partition, token: int) -> int:
    return next(n for n, end in enumerate(partition.cu_seqlens[1:]) if token < end)


@SETTINGS
@given(plan=PLANS)
def test_spans_are_runs_in_memory_and_chains_are_documents(plan):
    partition, spans = plan.partition, plan.spans
    places = {}
    for rank in range(partition.world_size):
        tokens = memory_of(partition, rank)
        keys = [(document_of(partition, token), token - index) for index, token in enumerate(tokens)]
        runs = [list(run) for _, run in groupby(range(len(tokens)), key=keys.__getitem__)]
        expected = [(keys[run[0]][0], tokens[run[0]], tokens[run[-1]] + 1) for run in runs]
        found = [span for span in spans.of_rank(rank) if span.num_tokens]
        assert [(span.document, span.start, span.end) for span in found] == expected
        assert spans.local_starts(rank)[: len(runs)] == tuple(run[0] for run in runs)
        for span in found:
            places[span.start] = (rank, span)
    for number, chain in enumerate(spans.chains):
        own = [places[start] for start in sorted(places) if places[start][1].document == chain.document]
        assert chain.ranks == tuple(rank for rank, _ in own)
        assert [(span.chain, span.position) for _, span in own] == [(number, n) for n in range(len(own))]
        assert [span.role for _, span in own] == [Role.FIRST, *[Role.MIDDLE] * (len(own) - 2), Role.LAST]


@SETTINGS
@given(plan=PLANS)
def test_every_document_begins_and_ends_once_and_empty_ones_on_rank_0(plan):
    partition = plan.partition
    for ends in ((Role.FIRST, Role.WHOLE), (Role.LAST, Role.WHOLE)):
        owners = [
            (plan.spans.of_rank(rank)[number].document, rank)
            for rank in range(partition.world_size)
            for number in plan.numbers_of(rank, *ends)
        ]
        assert sorted(document for document, _ in owners) == list(range(partition.num_documents))
        for document, rank in owners:
            start, end = partition.cu_seqlens[document : document + 2]
            token = start if ends[0] is Role.FIRST else end - 1
            assert token in memory_of(partition, rank) if end > start else rank == 0


@SETTINGS
@given(plan=PLANS, width=st.integers(2, 4), with_state=st.booleans())
def test_halos_are_the_tokens_before_each_span(plan, width, with_state):
    partition, reach = plan.partition, width - 1
    cu = partition.cu_seqlens
    halos = [plan.halo(rank, width, with_state) for rank in range(partition.world_size)]
    memory = [memory_of(partition, rank) for rank in range(partition.world_size)]
    for target, halo in enumerate(halos):
        spans = plan.spans.of_rank(target)
        filled = {}
        for source, slots in halo.receives.items():
            sent = halos[source].sends[target]
            assert len(sent) == len(slots), "both sides count the same messages"
            for (order, span, token, place, _), (same, *slot) in zip(sent, slots):
                assert order == same
                filled[tuple(slot)] = ("state", span, place) if token < 0 else memory[source][token]
                if token >= 0:
                    assert memory[source][token] == plan.spans.of_rank(source)[span].end - reach + place
        expected = {}
        for number, span in enumerate(spans):
            first = cu[span.document]
            for slot in range(reach) if span.start > first else ():
                token = span.start - reach + slot
                if token >= first:
                    expected[number, slot] = token
                elif with_state:
                    expected[number, slot] = ("state", span.document, token - (first - reach))
        assert filled == expected
    assert all(target in halos[source].receives for target, halo in enumerate(halos) for source in halo.sends)


@SETTINGS
@given(plan=PLANS, width=st.integers(2, 4))
def test_gradients_of_a_token_come_in_layers_in_the_order_of_the_spans(plan, width):
    partition = plan.partition
    for rank in range(partition.world_size):
        sends = plan.halo(rank, width, True).sends
        layers = {}
        for target, sources in sends.items():
            slots = plan.halo(target, width, True).receives[rank]
            for (_, span, token, slot, layer), (_, filled, _) in zip(sources, slots):
                key = (token < 0, span, slot)
                layers.setdefault(key, []).append((layer, plan.spans.of_rank(target)[filled].start))
        for found in layers.values():
            assert [layer for layer, _ in sorted(found)] == list(range(len(found)))
            assert [start for _, start in sorted(found)] == sorted(start for _, start in found)


def run_schedules(plan: ParallelPlan, name: str, heads: int, backward: bool):
    """Carry symbols through the schedules of all ranks; returns what enters each (chain, place, head), and traffic."""
    world_size = plan.partition.world_size
    schedules = [plan.schedule(name, rank, heads, backward) for rank in range(world_size)]
    received = [0] * world_size
    entered: dict[tuple[int, int, int], set[int]] = {}

    def carry(messages, size_of):
        for target, own in enumerate(messages):
            for source, runs in own.receives.items():
                assert messages[source].sends[target] == runs, "both sides have the same order"
                if source != target:
                    received[target] += sum((run.end_head - run.first_head) * size_of(run) for run in runs)
        assert all(
            t in messages[s].sends and s in messages[t].receives for s in range(world_size) for t in messages[s].sends
        )

    def enter(run, rank, ranks):
        for head in range(run.first_head, run.end_head):
            entered.setdefault((run.chain, run.place, head), set()).add(rank)
        assert ranks[run.place] == rank

    if isinstance(schedules[0], WalkSchedule):
        carry([schedule.collect for schedule in schedules], lambda run: 2 if run.place else 1)
        carry([schedule.deliver for schedule in schedules], lambda run: 1)
        for rank, schedule in enumerate(schedules):
            have = {
                (run.chain, run.place, head)
                for runs in schedule.collect.receives.values()
                for run in runs
                for head in range(run.first_head, run.end_head)
            }
            for walk in schedule.walks:
                for head in range(walk.first_head, walk.end_head):
                    assert all((walk.chain, place, head) in have for place in range(walk.last_place))
            for runs in schedule.deliver.receives.values():
                for run in runs:
                    enter(run, rank, walking_ranks(plan.spans.chains[run.chain], backward))
    else:
        for number in range(max(len(schedule.rounds) for schedule in schedules)):
            carry([schedule.rounds[number] for schedule in schedules], lambda run: 1)
            for rank, schedule in enumerate(schedules):
                for runs in schedule.rounds[number].receives.values():
                    for run in runs:
                        assert run.place == number
                        ranks = walking_ranks(plan.spans.chains[run.chain], backward)
                        enter(run._replace(place=run.place + 1), rank, ranks)
    return entered, tuple(received)


@SETTINGS
@given(plan=PLANS, heads=st.integers(1, 5), backward=st.booleans())
def test_every_exchange_gives_each_span_its_state_once_and_moves_what_is_said(plan, heads, backward):
    chains = plan.spans.chains
    needed = {
        (number, place, head)
        for number, chain in enumerate(chains)
        for place in range(1, len(chain.ranks))
        for head in range(heads)
    }
    for name in EXCHANGES:
        entered, received = run_schedules(plan, name, heads, backward)
        assert set(entered) == needed
        assert all(len(ranks) == 1 for ranks in entered.values())
        traffic = plan.traffic(name, heads, backward)
        assert traffic.received == received
        assert sum(traffic.most_in_round) >= max(received)


def test_the_worked_example():
    """Ragged, two ranks: a span of one token, and a halo from both ranks."""
    plan = ParallelPlan(Partition.per_document_zigzag([0, 13, 18, 20], 2))
    assert [chain.ranks for chain in plan.spans.chains] == [(0, 1, 0), (0, 1, 0), (0, 1)]
    assert plan.phases(1, False) == ((), (), (0, 1, 2)) and plan.phases(1, True) == ((2,), (), (0, 1))
    halo = plan.halo(0, 4, False)
    # Span 3 of rank 0 is token 17, after 14 of its own and 15 and 16 of rank 1.
    assert [tuple(slot) for _, *slot in halo.receives[1]] == [(1, 0), (1, 1), (1, 2), (3, 1), (3, 2)]
    assert [tuple(slot) for _, *slot in halo.receives[0]] == [(3, 0)]


def test_summaries_are_of_inner_spans_only():
    """Two ranks, one document: nothing but the state that leaves rank 0 moves, whatever the exchange."""
    plan = ParallelPlan(Partition.contiguous([0, 1000], 2))
    for name in ("all_gather", "relay"):
        assert plan.traffic(name, 7, False).received == (0, 7)
        assert plan.traffic(name, 7, True).received == (7, 0)


def test_64_documents_on_16_ranks_receive_less_than_800_mib_each():
    generator = random.Random(0)
    lengths = [generator.randrange(2000, 6000) for _ in range(64)]
    plan = ParallelPlan(Partition.per_document_zigzag(boundaries(lengths), 16))
    assert plan.choose("auto", 32, 128) == "spread"
    costs = {cost.name: cost for cost in plan.costs(32, 128)}
    assert max(costs["spread"].received_bytes) < 800 << 20
    assert max(costs["all_gather"].received_bytes) > 8 * max(costs["spread"].received_bytes)
    table = plan.explain(32, 128)
    assert "680.0 + 680.0" in table and "30 + 30" in table and table.count("<- taken") == 1


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "per_document_zigzag", "balanced"])
def test_10000_documents_on_64_ranks_are_planned_within_a_second(layout):
    generator = random.Random(0)
    cu = boundaries([generator.randrange(400) for _ in range(10_000)])
    extra = {"whole_below": 300} if layout == "balanced" else {}

    def seconds() -> float:
        begin = time.process_time()
        plan = ParallelPlan(getattr(Partition, layout)(cu, 64, **extra))
        name = plan.choose("auto", 32, 128)
        for backward in (False, True):
            plan.phases(5, backward)
            plan.schedule(name, 5, 32, backward)
        plan.halo(5, 4, True)
        return time.process_time() - begin

    # 0.5 s for per_document_zigzag, 0.02 s for the others; the better of two, for others may have the processor's cache
    assert min(seconds() for _ in range(2)) < 1.0


def test_one_rank_needs_no_exchange():
    plan = ParallelPlan(Partition.zigzag([0, 10, 10, 50], 1))
    assert not plan.needs_exchange and plan.spans.chains == ()
    assert [span.role for span in plan.spans.of_rank(0)] == [Role.WHOLE] * 3
    assert all(plan.traffic(name, 4, False).received == (0,) for name in EXCHANGES)
    assert "0 of 3 documents on several ranks" in plan.explain(4, 64)


def test_an_unknown_exchange_is_refused():
    with pytest.raises(
        UnsupportedProblemError, match="exchange='ring'; use 'auto' or one of all_gather, spread, relay"
    ):
        ParallelPlan(Partition.contiguous([0, 4], 2)).explain(1, 64, "ring")
