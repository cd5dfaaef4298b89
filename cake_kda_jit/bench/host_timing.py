"""How the host's time is taken: bursts of calls behind an idle device, all in turn, and clocks that take them apart."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from ..errors import UnsupportedProblemError
from .core import Row, Times

WARMUP = 3  # rounds
BACKWARD_BURST = 4  # what several forwards keep must fit the device
TURNS = 1000  # of the bare loop that tells the host's pace
TWO_PACES = 1.3  # of the slower loops over the faster ones, from which on they are two: 1.7 to 2 were met, noise is 1.1
PRODUCTS, LAUNCHES = ", torch's products", ", launches"
INSIDE, PYTHON, CLOCKED = ", inside its nodes", ", Python time", ", with clocks"

Place = tuple[object, str]
"""A function as its owner, a module or a class, and its name there."""

TORCH_PRODUCTS: tuple[Place, ...] = ((functional, "linear"), (torch, "mm"), (torch, "addmm"))
_NODES: tuple[Place, ...] = ((torch.autograd.function.BackwardCFunction, "apply"),)


class Inside:
    """While it is entered, adds up the seconds within some functions, in all threads."""

    def __init__(self, *places: Place) -> None:
        self.places, self.seconds = places, 0.0

    def __enter__(self) -> Inside:
        self._functions = [getattr(owner, name) for owner, name in self.places]
        for (owner, name), function in zip(self.places, self._functions):
            setattr(owner, name, self._timed(function))
        return self

    def __exit__(self, *_: object) -> None:
        for (owner, name), function in zip(self.places, self._functions):
            setattr(owner, name, function)

    def take(self) -> float:
        """Return the seconds since this was last called."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _timed(self, function: Callable) -> Callable:
        now = time.perf_counter

        def timed(*arguments: object, **keywords: object) -> object:
            began = now()
            try:
                return function(*arguments, **keywords)
            finally:
                self.seconds += now() - began

        return timed


@dataclass(frozen=True)
class Subject:
    """A call that is timed, of ``count`` equal parts, of which each gets its share; its backward too if it has leaves.

    ``clocks`` are the places of a share of its time, by the share's name: if there are some, the call is also timed
    with clocks on them.
    """

    name: str
    run: Callable[[], object]
    leaves: Sequence[torch.Tensor] = ()
    count: int = 1
    clocks: Mapping[str, Sequence[Place]] = field(default_factory=dict)
    engine: str = "cake_kda_jit"

    def backward(self) -> Callable[[object], object]:
        """Return the backward of what ``run`` returns."""
        directions = [torch.ones_like(o) for o in _listed(self.run())]
        return lambda o: torch.autograd.grad(_listed(o), self.leaves, directions)


@dataclass(frozen=True, kw_only=True)
class HostRow(Row):
    """A row of which each run knows the host's pace, by a bare loop beside it.

    ``fast`` and ``slow`` are the times of the runs at either pace: None without such a run, or if there is one pace.
    """

    fast: Times | None
    slow: Times | None


class Bursts:
    """Bursts of ``call(prepare())``, of which the clocks, by their shares' names, take each apart."""

    def __init__(
        self,
        call: Callable[[object], object],
        burst: int,
        prepare: Callable[[], object] = lambda: None,
        clocks: Mapping[str, Inside] | None = None,
    ) -> None:
        self.call, self.burst, self.prepare, self.clocks = call, burst, prepare, clocks or {}

    def take(self, device: torch.device) -> tuple[float, dict[str, float]]:
        """Return the seconds of a call until it returns, without those of ``prepare``, and the clocks'.

        The call ahead of the burst does not count. What the calls return is freed when all of them have been timed, as
        a step does that keeps it for its backward.
        """
        call, clocks = self.call, self.clocks
        first, *prepared = [self.prepare() for _ in range(1 + self.burst)]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        with ExitStack() as entered:
            for clock in clocks.values():
                entered.enter_context(clock)
            kept = [call(first)]
            for clock in clocks.values():
                clock.take()
            began = time.perf_counter()
            kept += [call(one) for one in prepared]
            span = time.perf_counter() - began
        return span / self.burst, {name: clock.take() / self.burst for name, clock in clocks.items()}


class Timed:
    """A subject's rows; each ``take`` is a burst of all that is timed of it."""

    def __init__(self, subject: Subject, device: torch.device, burst: int) -> None:
        self.subject, self.device = subject, device
        forward, backward = (max(1, calls // subject.count) for calls in (burst, BACKWARD_BURST))
        run = subject.run
        self._forwards = [Bursts(lambda _: run(), forward)]
        self._backwards = [Bursts(subject.backward(), backward, run)] if subject.leaves else []
        if subject.clocks:
            clocks = {name: Inside(*places) for name, places in subject.clocks.items()}
            self._forwards.append(Bursts(lambda _: run(), forward, clocks=clocks))
        if subject.clocks and subject.leaves:
            clocks = {INSIDE: Inside(*_NODES), **clocks}
            self._backwards.append(Bursts(subject.backward(), backward, run, clocks))

    def take(self) -> Iterator[tuple[str, tuple[float, float]]]:
        """Yield a row's name with the pace beside its burst, as of ``turns``, and the milliseconds of a part."""
        for suffix, all_bursts in ("", self._forwards), (", backward", self._backwards):
            for bursts in all_bursts:
                span, shares = bursts.take(self.device)
                pace = turns()
                found = self._taken_apart(span, shares) if bursts.clocks else {"": span}
                for name, seconds in found.items():
                    yield f"{self.subject.name}{suffix}{name}", (pace, 1e3 * seconds / self.subject.count)

    def _taken_apart(self, span: float, shares: dict[str, float]) -> dict[str, float]:
        """Return a call's seconds, those of its shares, and the rest of it, or of its nodes of autograd.

        A share that no clock saw is none: torch's engine calls the products of its own nodes in C++.
        """
        whole = shares.get(INSIDE, span)
        rest = whole - sum(seconds for name, seconds in shares.items() if name != INSIDE)
        unseen = [name for name, seconds in shares.items() if not seconds]
        if unseen and INSIDE not in shares:
            places = ", ".join(name for share in unseen for _, name in self.subject.clocks[share])
            raise UnsupportedProblemError(
                f"{self.subject.name} was not seen to call {places}; its time can only be taken apart by functions "
                "that are looked up where the clocks are when they are called"
            )
        return {CLOCKED: span, **{name: seconds for name, seconds in shares.items() if seconds}, PYTHON: rest}


def measure(subjects: Sequence[Subject], device: torch.device, runs: int, burst: int, case: str) -> list[HostRow]:
    """Return the subjects' rows of ``runs`` rounds, in each of which every row gets a burst of ``burst`` parts.

    Raises UnsupportedProblemError for clocks that are not met.
    """
    timed = [Timed(subject, device, burst) for subject in subjects]
    engines: dict[str, str] = {}
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(WARMUP + runs):
        for one in timed:
            for name, sample in one.take():
                engines[name] = one.subject.engine
                if number >= WARMUP:
                    found.setdefault(name, []).append(sample)
    limit = between_paces([loop for samples in found.values() for loop, _ in samples])
    return [_row(case, name, engines[name], samples, limit) for name, samples in found.items()]


def between_paces(loops: Sequence[float]) -> float | None:
    """Return the seconds of a loop between those at the host's two paces, None if there is one.

    A twentieth of the loops at either end may be anything.
    """
    ordered = sorted(loops)
    fast, slow = ordered[len(loops) // 20], ordered[-1 - len(loops) // 20]
    return math.sqrt(fast * slow) if slow >= TWO_PACES * fast else None


def turns() -> float:
    """Return the seconds of ``TURNS`` turns of a bare loop."""
    total, began = 0, time.perf_counter()
    for turn in range(TURNS):
        total += turn
    return time.perf_counter() - began


def _row(case: str, name: str, engine: str, samples: Sequence[tuple[float, float]], limit: float | None) -> HostRow:
    fast, slow = [], []
    for loop, value in samples if limit is not None else ():
        (fast if loop < limit else slow).append(value)
    return HostRow(case, name, engine, _times([value for _, value in samples]), fast=_times(fast), slow=_times(slow))


def _times(values: Sequence[float]) -> Times | None:
    return Times(statistics.median(values), min(values), max(values), len(values)) if values else None


def _listed(outputs: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
    return outputs if isinstance(outputs, list) else [outputs]
