"""How a channel follows exchanges that a device's stream waits for: with events in place of a device's."""

from __future__ import annotations

import time
from collections import deque

import pytest
import torch
import torch.distributed as dist

from cake_kda_jit import CommunicationError, UnsupportedProblemError
from cake_kda_jit.cp import comm
from cake_kda_jit.cp.comm import TorchChannel


class Event:
    """Is over after some queries, or never."""

    def __init__(self, queries: float = 0) -> None:
        self.queries = queries

    def query(self) -> bool:
        self.queries -= 1
        return self.queries < 0


class Group:
    """Counts how often its backend is given up."""

    def __init__(self) -> None:
        self.aborted = 0

    def _get_backend(self, device):
        return self

    def abort(self) -> None:
        self.aborted += 1


@pytest.fixture
def channel() -> TorchChannel:
    made = object.__new__(TorchChannel)
    made.rank, made.world_size, made.timeout, made.group = 1, 2, 0.2, Group()
    made._ahead = deque()
    return made


class Started:
    """An exchange that notes when it was waited for."""

    def __init__(self, calls: list) -> None:
        self.calls = calls

    def wait(self) -> None:
        self.calls.append("wait")


DEVICE = torch.device("cuda", 0)


def test_the_host_stays_ahead_by_a_few_exchanges(channel):
    slow = Event(3)
    channel.follow("first", DEVICE, slow)
    for number in range(comm.MOST_AHEAD - 1):
        channel.follow(f"exchange {number}", DEVICE, Event(float("inf")))
    assert slow.queries == 3, "nothing was waited for"
    channel.follow("one more", DEVICE, Event())
    assert slow.queries < 0 and len(channel._ahead) == comm.MOST_AHEAD


def test_settling_waits_for_all(channel):
    events = [Event(2) for _ in range(comm.MOST_AHEAD)]
    for event in events:
        channel.follow("exchange", DEVICE, event)
    channel.settle()
    assert not channel._ahead and all(event.queries < 0 for event in events)


def test_an_exchange_that_does_not_end_is_an_error_and_the_group_is_given_up(channel):
    channel.follow("exchange 7", DEVICE, Event(float("inf")))
    begin = time.monotonic()
    with pytest.raises(CommunicationError, match="rank 1 of 2: the exchange 'exchange 7' failed: .*timeout=0.2 s"):
        channel.settle()
    assert 0.2 <= time.monotonic() - begin < 5
    assert channel.group.aborted == 1 and not channel._ahead


def test_a_device_that_has_failed_is_an_error_of_the_exchange(channel, monkeypatch):
    def query():
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    event = Event()
    monkeypatch.setattr(event, "query", query)
    channel.follow("states", DEVICE, event)
    with pytest.raises(CommunicationError, match="'states' failed: CUDA error: an illegal .*ered; a peer ended"):
        channel.settle()


def test_a_group_that_was_destroyed_is_an_error_of_ours(tmp_path):
    """Not one of torch, which says neither who asked nor what to do."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        group = dist.new_group()
        channel = TorchChannel(group, timeout=5)
        dist.destroy_process_group(group)
        with pytest.raises(CommunicationError, match="exchange 'states' failed: .*not registered"):
            channel._start({}, {0: torch.zeros(1)}, "states")
        with pytest.raises(UnsupportedProblemError, match="group is not registered with torch.distributed"):
            TorchChannel(group, timeout=5)
    finally:
        dist.destroy_process_group()


def test_all_peers_are_connected_before_anything_else_is_launched(channel, monkeypatch):
    """With a message each, which has come before ``prepare`` returns."""
    calls = []

    def start(sends, receives, label):
        calls.append((sorted(sends), sorted(receives), {one.numel() for one in (*sends.values(), *receives.values())}))
        return Started(calls)

    channel.world_size = 3
    channel.group = Group()
    monkeypatch.setattr(channel, "backend_of", lambda device: "nccl")
    monkeypatch.setattr(channel, "_start", start)
    monkeypatch.setattr(channel, "settle", lambda: calls.append("settle"))
    for _ in range(2):
        channel.prepare(torch.device("cpu"))
    assert calls == [([0, 2], [0, 2], {1}), "wait", "settle"], "once for a group and a device"
