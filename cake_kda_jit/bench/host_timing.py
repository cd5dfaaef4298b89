"""How the host's time is taken: bursts of calls behind an idle device, and what of them is spent inside torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from .core import Times

WARMUP = 5
BACKWARD_BURST = 4  # what several forwards keep must fit the device
OUTSIDE = ", outside of functional.linear"
NODES = ", backward, inside its nodes"


class Inside:
    """While it is entered, adds up the seconds within one function of torch, ``owner.name``, in all threads."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name, self.seconds = owner, name, 0.0

    def __enter__(self) -> Inside:
        self._function = function = getattr(self.owner, self.name)

        def timed(*arguments: object, **keywords: object) -> object:
            began = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(self.owner, self.name, timed)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self.owner, self.name, self._function)

    def take(self) -> float:
        """Return the seconds since this was last called."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def timed(
    call: Callable[[object], object],
    device: torch.device,
    runs: int,
    burst: int,
    prepare: Callable[[], object] = lambda: None,
    share: Callable[[float], float] = lambda span: span,
) -> Times:
    """Return milliseconds per ``call(prepare())`` until it returns, without those of ``prepare``, over bursts.

    ``share`` says what counts of the seconds of a burst, and is called before it too.
    """
    found = []
    for _ in range(WARMUP + runs):
        first, *prepared = [prepare() for _ in range(1 + burst)]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        call(first)
        share(0.0)
        began = time.perf_counter()
        for one in prepared:
            call(one)
        found.append(1e3 * share(time.perf_counter() - began) / burst)
    kept = found[WARMUP:]
    return Times(statistics.median(kept), min(kept), max(kept), runs)


@dataclass(frozen=True)
class Differentiated:
    """A call and what its backward differentiates."""

    run: Callable[[], object]
    leaves: Sequence[torch.Tensor]

    def backward(self) -> Callable[[object], object]:
        """Return the backward of what ``run`` returns."""
        directions = [torch.ones_like(o) for o in _listed(self.run())]
        return lambda o: torch.autograd.grad(_listed(o), self.leaves, directions)


def time_backward(
    call: Differentiated, device: torch.device, runs: int, share: Callable[[float], float] = lambda span: span
) -> Times:
    """Return milliseconds per backward, as ``timed``."""
    return timed(call.backward(), device, runs, BACKWARD_BURST, call.run, share)


def measure_shares(
    layer: Differentiated, device: torch.device, runs: int, burst: int, *, with_backward: bool
) -> dict[str, Times]:
    """Return what a layer's forward spends outside of functional.linear, and its backward inside its nodes."""
    with Inside(functional, "linear") as linear:
        found = {OUTSIDE: timed(lambda _: layer.run(), device, runs, burst, share=lambda span: span - linear.take())}
    if with_backward:
        with Inside(torch.autograd.function.BackwardCFunction, "apply") as node:
            found[NODES] = time_backward(layer, device, runs, lambda _: node.take())
    return found


def _listed(outputs: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
    return outputs if isinstance(outputs, list) else [outputs]
