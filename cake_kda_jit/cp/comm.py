"""Exchange of tensors over a ``torch.distributed`` group: gloo and NCCL, through the same calls."""

from __future__ import annotations

import json
import time
import zlib
from collections import deque
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..errors import CommunicationError, UnsupportedProblemError
from .agreement import find_disagreement
from .channel import Channel, Exchange

SHORTEST_WAIT = timedelta(milliseconds=1)
MOST_AHEAD = 2
"""Exchanges of a stream that the host may be ahead of: enough to launch what follows, and no more to be late by."""
POLL_SECONDS = 5e-5

_devices_met: WeakKeyDictionary[dist.ProcessGroup, set[torch.device]] = WeakKeyDictionary()


def tag_of(label: str, tensor: torch.Tensor) -> int:
    """Return a message's tag, 31 bits. Messages of other sizes or labels never meet: gloo would end the process."""
    return zlib.crc32(f"{label}/{tensor.nbytes}".encode()) & 0x7FFFFFFF


class TorchChannel(Channel):
    """A rank of a process group; an exchange that takes longer than ``timeout`` seconds fails on every rank in it.

    Over gloo the host waits for an exchange. Over NCCL its stream does, and the host goes on; a late peer is then found
    when the host is ``MOST_AHEAD`` exchanges ahead, or in ``settle``.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise UnsupportedProblemError(
                "torch.distributed is not initialized; call torch.distributed.init_process_group first, or give a "
                "VirtualGroup"
            )
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup):
            raise UnsupportedProblemError(
                f"group is {type(group).__name__}; give a ProcessGroup that this rank belongs to, a VirtualGroup, or "
                "None for all ranks"
            )
        try:
            super().__init__(dist.get_rank(group), dist.get_world_size(group))
        except ValueError as error:
            raise UnsupportedProblemError(
                "group is not registered with torch.distributed; make it with torch.distributed.new_group, and destroy "
                "it behind its last context"
            ) from error
        self.group = group
        self.timeout = timeout
        self._peers = [dist.get_global_rank(group, rank) for rank in range(self.world_size)]
        self._store = dist.distributed_c10d._get_process_group_store(group)
        self._is_nccl = False
        self._nothing = torch.empty(0, dtype=torch.uint8)
        self._ahead: deque[tuple[str, torch.device, torch.cuda.Event]] = deque()

    def backend_of(self, device: torch.device) -> str:
        """Return the backend that carries tensors of a device: gloo, nccl. Raises if the group has none for it."""
        config = str(dist.get_backend_config(self.group))
        backends = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
        if device.type not in backends:
            raise UnsupportedProblemError(
                f"tensors are on {device}; the group carries {', '.join(backends)} only: move them, or make a group "
                "with a backend for both"
            )
        return backends[device.type]

    def prepare(self, device: torch.device) -> None:
        """See Channel. NCCL connects at the first use of a group's device, which all its contexts share."""
        met = _devices_met.setdefault(self.group, set())
        self._nothing = torch.empty(0, dtype=torch.uint8, device=device)
        self._is_nccl = self.backend_of(device) == "nccl"
        if self._is_nccl and device not in met:
            self._connect(device)
        met.add(device)

    def _connect(self, device: torch.device) -> None:
        """Connect with every peer by a first message each, and wait until it has come.

        Both hosts work on a connection. So no exchange takes longer for it, and no kernel is loaded, which may wait for
        the device, while the device waits for a peer that needs this process to connect.
        """
        message = torch.zeros(1, dtype=torch.uint8, device=device)
        sends = {peer: message for peer in range(self.world_size) if peer != self.rank}
        receives = {peer: torch.empty_like(message) for peer in sends}
        self._start(sends, receives, "first use of a device").wait()
        self.settle()

    def settle(self) -> None:
        """See Channel."""
        while self._ahead:
            self._settle_first()

    def follow(self, label: str, device: torch.device, event: torch.cuda.Event) -> None:
        """Remember that a device is past an exchange when an event is; waits for those too far back."""
        self._ahead.append((label, device, event))
        while len(self._ahead) > MOST_AHEAD:
            self._settle_first()

    def _settle_first(self) -> None:
        label, device, event = self._ahead.popleft()
        deadline = time.monotonic() + self.timeout
        while not self._is_past(label, event):
            if time.monotonic() > deadline:
                self._ahead.clear()
                # Its kernels would spin for ever, and whoever waits for the device with them.
                self.group._get_backend(device).abort()
                raise self._failure(label, TimeoutError("the device has not come past it"))
            time.sleep(POLL_SECONDS)

    def _is_past(self, label: str, event: torch.cuda.Event) -> bool:
        try:
            return event.query()
        except RuntimeError as error:  # the device has failed: a peer that gives up takes its memory with it
            raise self._failure(label, error) from error

    def _start(self, sends, receives, label) -> Exchange:
        try:
            return (self._start_on_stream if self._is_nccl else self._start_on_host)(sends, receives, label)
        except (RuntimeError, ValueError) as error:  # the latter of a group that was destroyed
            raise self._failure(label, error) from error

    def _start_on_stream(self, sends, receives, label) -> Exchange:
        """One collective of all ranks, with messages or without: it costs the host the same for any number of peers."""

        def by_rank(messages: dict[int, torch.Tensor]) -> list[torch.Tensor]:
            tensors = (messages.get(rank) for rank in range(self.world_size))
            return [self._nothing if tensor is None else tensor.view(torch.uint8) for tensor in tensors]

        given, taken = by_rank(sends), by_rank(receives)
        work = dist.all_to_all(taken, given, group=self.group, async_op=True)
        return _StreamExchange(self, label, work, self._nothing.device, (given, taken))

    def _start_on_host(self, sends, receives, label) -> Exchange:
        tensors = [*sends.values(), *receives.values()]
        if not tensors:
            return _HostExchange(self, label, [], {}, ())
        device = tensors[0].device
        staged = device.type == "cuda"
        own = {peer: _pinned_like(tensor) for peer, tensor in receives.items()} if staged else receives
        if staged:
            sends = _copies_on_host(sends, device)
        operations = [
            dist.P2POp(function, tensor.view(torch.uint8), self._peers[peer], self.group, tag_of(label, tensor))
            for function, messages in ((dist.irecv, own), (dist.isend, sends))
            for peer, tensor in sorted(messages.items())
        ]
        works = dist.batch_isend_irecv(operations)
        arrived = {peer: (own[peer], tensor) for peer, tensor in receives.items()} if staged else {}
        return _HostExchange(self, label, works, arrived, (sends, own))

    def _failure(self, label: str, error: Exception) -> CommunicationError:
        reason = str(error).strip().partition("\n")[0]
        return CommunicationError(
            f"rank {self.rank} of {self.world_size}: the exchange {label!r} failed: {reason}; a peer ended, is late by "
            f"more than timeout={self.timeout} s, or made other calls. The group is not usable any more"
        )

    # ---- agreement, through the group's store ----

    def _judge(self, topic: str, fields: dict[str, str]) -> tuple[int, str | None]:
        """Rank 0 compares and tells all, late ones too: a handful of requests to the store per rank, for any W."""
        try:
            turn = self._store.add(f"cake_kda_jit/{topic}/turn/{self.rank}", 1)
            base = f"cake_kda_jit/{topic}/{turn}"
            self._store.set(f"{base}/fields/{self.rank}", json.dumps(fields))
            if self.rank == 0:
                self._store.set(f"{base}/verdict", json.dumps(self._verdict(base)))
            verdict = self._read_verdict(base)
            if turn > 1:
                # All ranks are done with the agreement before this one.
                self._store.delete_key(f"cake_kda_jit/{topic}/{turn - 1}/fields/{self.rank}")
        except RuntimeError as error:
            raise CommunicationError(f"{topic}: the group's store cannot be reached: {error}") from error
        if verdict["failure"] is not None:
            raise CommunicationError(f"{topic}, timeout={self.timeout} s: {verdict['failure']}")
        return turn, verdict["disagreement"]

    def _verdict(self, base: str) -> dict[str, str | None]:
        """What rank 0 tells: what failed, or in what ranks disagree, or neither."""
        keys = [f"{base}/fields/{rank}" for rank in range(self.world_size)]
        if not self._wait(keys, self.timeout):
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            return {"failure": f"ranks {missing} did not take part in time", "disagreement": None}
        if self._store.add(f"{base}/gave_up", 0):
            return {"failure": "rank 0 came too late, others have given up", "disagreement": None}
        given = [json.loads(text) for text in self._store.multi_get(keys)]
        return {"failure": None, "disagreement": find_disagreement(given)}

    def _read_verdict(self, base: str) -> dict[str, str | None]:
        # Twice the time: rank 0 may have begun to wait later, and what it tells says more.
        if self._wait([f"{base}/verdict"], 2 * self.timeout):
            return json.loads(self._store.get(f"{base}/verdict"))
        self._store.add(f"{base}/gave_up", 1)
        return {"failure": f"rank 0 gave rank {self.rank} no answer", "disagreement": None}

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Whether all keys are there in time."""
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError:
            return all(self._store.check([key]) for key in keys)
        return True


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _copies_on_host(tensors: dict[int, torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
    copies = {}
    for peer, tensor in tensors.items():
        copies[peer] = _pinned_like(tensor)
        copies[peer].copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(device).synchronize()
    return copies


class _HostExchange(Exchange):
    """Works under way; ``arrived`` maps peers to (host tensor, its place on the device) where tensors are staged."""

    def __init__(self, channel: TorchChannel, label: str, works: list, arrived: dict, alive: tuple) -> None:
        self._channel, self._label, self._works, self._arrived, self._alive = channel, label, works, arrived, alive

    def wait(self) -> None:
        deadline = time.monotonic() + self._channel.timeout
        try:
            for work in self._works:
                work.wait(max(timedelta(seconds=deadline - time.monotonic()), SHORTEST_WAIT))
        except RuntimeError as error:
            raise self._channel._failure(self._label, error) from error
        for host, place in self._arrived.values():
            place.copy_(host, non_blocking=True)


class _StreamExchange(Exchange):
    """A work that the device's stream waits for, and not the host."""

    def __init__(self, channel: TorchChannel, label: str, work: dist.Work, device: torch.device, alive: tuple) -> None:
        self._channel, self._label, self._work, self._device, self._alive = channel, label, work, device, alive

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._channel._failure(self._label, error) from error
        self._channel.follow(self._label, self._device, torch.cuda.current_stream(self._device).record_event())
