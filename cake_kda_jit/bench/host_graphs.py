"""The layer of ``bench host`` in CUDA graphs: one each way, in torch's node of autograd and replayed by themselves.

A call replays what was captured, so it has all that a step with another pack needs besides: the pack's boundaries, its
input and its output's gradient are copied to where the graphs read them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.func import functional_call

from ..layers import KimiDeltaAttention
from ..ops.plan import Plan

GRAPHED = "the layer, graphed"
ALONE = "the layer as a graph alone"
ALONE_BACKWARD = f"{ALONE}, backward"
WARMUP = 2  # steps before a capture, which cannot load kernels


class GraphedLayer:
    """A layer with its gradients, in two graphs: a function of inputs and boundaries like those that it is made with.

    ``plan`` is a capacity plan, ``boundaries [max_documents + 1]`` on its device are filled up with the last one.
    """

    def __init__(self, layer: KimiDeltaAttention, plan: Plan, x: torch.Tensor, boundaries: torch.Tensor) -> None:
        self._layer, self._plan = layer, plan  # whose memory the graphs use as long as they are replayed
        self._names, self._parameters = zip(*layer.named_parameters())
        # Captured with the parameters themselves, their nodes of autograd would stay on the capture's stream, and every
        # backward would synchronise two streams for each of them. These are leaves in the same memory.
        leaves = [parameter.detach().requires_grad_() for parameter in self._parameters]
        self._graphed = torch.cuda.make_graphed_callables(self._attend, (x, boundaries, *leaves))

    def __call__(self, x: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, in memory that the next call writes over."""
        return self._graphed(x, boundaries, *self._parameters)

    def _attend(self, x: torch.Tensor, boundaries: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        self._plan.update(boundaries)
        return functional_call(self._layer, dict(zip(self._names, leaves)), (x,), {"plan": self._plan})


def make_graph_calls(
    layer: KimiDeltaAttention, x: torch.Tensor, plan: Plan, boundaries: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """Return the calls by name, each with its copies; ``boundaries`` as of a ``GraphedLayer``.

    The first returns the layer's output with its gradient, the others only replay.
    """
    on_host, where, own = boundaries.cpu(), boundaries.clone(), x.detach().clone().requires_grad_()
    graphed = GraphedLayer(layer, plan, own, where)

    def call() -> torch.Tensor:
        where.copy_(on_host, non_blocking=True)
        return graphed(x, where)

    return {GRAPHED: call, **_replays(layer, x, plan, boundaries)}


def _replays(
    layer: KimiDeltaAttention, x: torch.Tensor, plan: Plan, boundaries: torch.Tensor
) -> dict[str, Callable[[], object]]:
    on_host, where, own = boundaries.cpu(), boundaries.clone(), x.detach().clone().requires_grad_()
    leaves, given, direction = [own, *layer.parameters()], torch.ones_like(x), torch.ones_like(x)

    def attend() -> torch.Tensor:
        plan.update(where)
        return layer(own, plan=plan)

    def differentiate(o: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(o, leaves, direction)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            differentiate(attend())
    torch.cuda.current_stream().wait_stream(stream)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        o = attend()
    with torch.cuda.graph(backward, pool=forward.pool()):
        differentiate(o)

    def replay_forward() -> None:
        where.copy_(on_host, non_blocking=True)
        with torch.no_grad():
            own.copy_(x)
        forward.replay()

    def replay_backward() -> None:
        direction.copy_(given)
        backward.replay()

    return {ALONE: replay_forward, ALONE_BACKWARD: replay_backward}
