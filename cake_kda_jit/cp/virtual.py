"""All ranks in one process, on one device: for tests, and to measure what each rank computes.

Each rank is a thread, and one runs at a time: a baton goes round, and a rank hands it on only inside an exchange whose
messages are not there yet. So the ranks' times do not disturb each other, and a run is the same each time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import CommunicationError, UnsupportedProblemError
from .agreement import find_disagreement
from .channel import Channel, Exchange


class VirtualGroup:
    """A group of ``world_size`` ranks that exist in this process only; give it to ``KcpContext``."""

    def __init__(self, world_size: int) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise UnsupportedProblemError(f"world_size={world_size!r}; give the number of ranks, at least 1")
        self.world_size = world_size
        self.baton: Baton | None = None

    def size(self) -> int:
        """The number of ranks, as a ProcessGroup says it."""
        return self.world_size

    def channel(self, rank: int) -> Channel:
        """Return a rank's end of the group."""
        return VirtualChannel(self, rank)


class VirtualRun(NamedTuple):
    """What the ranks returned, and the seconds each of them ran."""

    results: list[Any]
    seconds: list[float]


class Baton:
    """Who runs. ``mail`` holds what has been sent and not yet been received, by (source, target, label)."""

    def __init__(self, world_size: int) -> None:
        self.mail: dict[tuple, torch.Tensor] = {}
        self.posted: dict[tuple, dict[int, dict[str, str]]] = {}
        self.seconds = [0.0] * world_size
        self.failure: tuple[int, BaseException] | None = None
        # One for each rank: nobody is woken but the next, who would compete with the one that runs.
        self._turns = [threading.Semaphore(int(rank == 0)) for rank in range(world_size)]
        self._wanted: list[tuple[str, Callable[[], bool]] | None] = [None] * world_size
        self._is_done = [False] * world_size
        self._since = time.perf_counter()

    def run(self, rank: int, work: Callable[[], Any]) -> Any:
        """Do a rank's work, from its first turn on; a failure ends the waiting of all others."""
        try:
            self._take(rank)
            return work()
        except BaseException as error:
            self.failure = self.failure or (rank, error)
            raise
        finally:
            self._is_done[rank] = True
            self._hand_on(rank)

    def wait(self, rank: int, what: str, is_there: Callable[[], bool]) -> None:
        """Let others run until what a rank waits for is there; raises CommunicationError if it never will be."""
        if is_there():
            return
        self._wanted[rank] = (what, is_there)
        self._hand_on(rank)
        self._take(rank)
        self._wanted[rank] = None

    def _take(self, rank: int) -> None:
        self._turns[rank].acquire()
        if self.failure is not None:
            failed, error = self.failure
            raise CommunicationError(f"rank {rank} waits in vain: rank {failed} failed: {error}")
        self._since = time.perf_counter()

    def _hand_on(self, rank: int) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds[rank] += time.perf_counter() - self._since
        following = self._next(rank)
        if following is not None:
            self._turns[following].release()

    def _next(self, rank: int) -> int | None:
        """The next rank that can go on, in turn. If none can, the first that waits is told that it does so in vain."""
        size = len(self._is_done)
        waiting = [other % size for other in range(rank + 1, rank + 1 + size) if not self._is_done[other % size]]
        for other in waiting:
            wanted = self._wanted[other]
            if self.failure is not None or wanted is None or wanted[1]():
                return other
        if not waiting:
            return None
        told = "; ".join(f"rank {other} waits for {self._wanted[other][0]}" for other in sorted(waiting))
        ended = [other for other in range(size) if self._is_done[other]]
        self.failure = (waiting[0], CommunicationError(f"no rank can go on: {told}; ranks {ended} have ended"))
        return waiting[0]


class VirtualChannel(Channel):
    """One rank of a VirtualGroup, while ``run_virtual`` runs."""

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        super().__init__(rank, group.world_size)
        self.group = group
        self._turns: dict[str, int] = {}

    @property
    def baton(self) -> Baton:
        """The baton of the run that is under way."""
        if self.group.baton is None:
            raise UnsupportedProblemError("ranks of a VirtualGroup can exchange inside run_virtual(ctx, fn) only")
        return self.group.baton

    def prepare(self, device: torch.device) -> None:
        """See Channel; there is nothing to do."""

    def _start(self, sends, receives, label) -> Exchange:
        for peer, tensor in sends.items():
            self.baton.mail[self.rank, peer, label, tensor.nbytes] = tensor
        return _VirtualExchange(self, receives, label)

    def _judge(self, topic: str, fields: dict[str, str]) -> tuple[int, str | None]:
        turn = self._turns[topic] = self._turns.get(topic, 0) + 1
        posted = self.baton.posted.setdefault((topic, turn), {})
        posted[self.rank] = fields
        self.baton.wait(self.rank, f"all ranks to agree on {topic!r}", lambda: len(posted) == self.world_size)
        return turn, find_disagreement([posted[rank] for rank in range(self.world_size)])


class _VirtualExchange(Exchange):
    def __init__(self, channel: VirtualChannel, receives: dict[int, torch.Tensor], label: str) -> None:
        self._channel, self._receives, self._label = channel, receives, label

    def wait(self) -> None:
        rank, baton, label = self._channel.rank, self._channel.baton, self._label
        keys = {peer: (peer, rank, label, tensor.nbytes) for peer, tensor in self._receives.items()}
        if not all(map(baton.mail.__contains__, keys.values())):
            what = f"messages of {label!r} from ranks {sorted(keys)}"
            baton.wait(rank, what, lambda: all(map(baton.mail.__contains__, keys.values())))
        if keys:  # all in one launch
            torch._foreach_copy_(
                [self._receives[peer] for peer in keys], [baton.mail.pop(key) for key in keys.values()]
            )


def run_virtual(ctx: Any, fn: Callable[[int, Any], Any]) -> VirtualRun:
    """Run ``fn(rank, ctx_of_rank)`` for every rank of a context made with a VirtualGroup.

    ``fn`` does forward and backward of one rank; all ranks must make the same calls in the same order. Backwards run on
    the rank's own thread. Returns what ``fn`` returned for each rank, and the seconds each rank ran, exchanges' waiting
    left out. The error of the first rank that fails is raised here; the next run begins with new contexts.
    """
    group = getattr(ctx, "group", None)
    if not isinstance(group, VirtualGroup):
        raise UnsupportedProblemError(
            f"the context's group is {type(group).__name__}; run_virtual needs KcpContext(partition, VirtualGroup(W))"
        )
    if group.baton is not None:
        raise UnsupportedProblemError("run_virtual is already running on this group; call one after the other")
    baton = group.baton = Baton(group.world_size)
    results: list[Any] = [None] * group.world_size
    is_grad_enabled = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(rank: int) -> None:
        # Autograd has one worker thread a device: a backward that waits there would keep all other ranks' from it.
        with torch.set_grad_enabled(is_grad_enabled), torch.autograd.set_multithreading_enabled(False):
            results[rank] = fn(rank, ctx.of_rank(rank))

    def thread(rank: int) -> None:
        try:
            if device is not None:  # no part of a rank's time
                torch.cuda.set_device(device)
            baton.run(rank, lambda: run(rank))
        except BaseException as error:  # noqa: BLE001 - told by run_virtual, on the caller's thread
            errors[rank] = error

    errors: dict[int, BaseException] = {}
    threads = [threading.Thread(target=thread, args=(rank,), daemon=True) for rank in range(group.world_size)]
    try:
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    finally:
        group.baton = None
    if baton.failure is not None:
        ctx.renew_ranks()
        raise baton.failure[1]
    return VirtualRun(results, list(baton.seconds))
