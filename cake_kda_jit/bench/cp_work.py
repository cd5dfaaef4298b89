"""What one rank does in ``bench cp``, and a group whose ranks never meet, so that each can be timed alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..cp.channel import Channel, Exchange
from ..cp.context import KcpContext
from ..cp.virtual import VirtualGroup
from ..ops.api import causal_conv1d, chunk_kda
from ..ops.parallel import short_convolutions
from ..ops.problem import KdaOptions

CONV_WIDTH = 4
NOISE = 0.02
"""Standard deviation of what stands for others' messages: a [128, 128] of it contracts, as an M does."""


@dataclass(frozen=True)
class ModuleInputs:
    """What enters the module's convolutions and recurrence, bf16, and the gradient of o; parameters as in the layer.

    ``projected`` are q, k and v ``[1, T, H K]`` before their convolutions. Tokens are random, so that any T of them
    are as good as those of a partition: ranks of all units take the first ones.
    """

    projected: tuple[torch.Tensor, ...]
    g: torch.Tensor
    beta: torch.Tensor
    do: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    A_log: torch.Tensor
    dt_bias: torch.Tensor


def make_inputs(tokens: int, heads: int, head_dim: int, device: torch.device, seed: int = 0) -> ModuleInputs:
    """Return random inputs of T tokens, the gate bounded by -5."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    channels = heads * head_dim
    return ModuleInputs(
        projected=tuple(normal(1, tokens, channels) for _ in range(3)),
        g=normal(1, tokens, heads, head_dim),
        beta=normal(1, tokens, heads),
        do=normal(1, tokens, heads, head_dim),
        weights=tuple(normal(channels, CONV_WIDTH) for _ in range(3)),
        A_log=torch.zeros(heads, device=device),
        dt_bias=torch.zeros(channels, device=device),
    )


class RankWork:
    """The module of a rank that holds ``tokens`` tokens; ``documents`` says of which, as the operations take it."""

    def __init__(
        self, inputs: ModuleInputs, tokens: int, *, options: KdaOptions | None = None, **documents: object
    ) -> None:
        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().requires_grad_()

        self._options, self._documents = options, documents
        self._projected = [leaf(x[:, :tokens]) for x in inputs.projected]
        self._g, self._beta = leaf(inputs.g[:, :tokens]), leaf(inputs.beta[:, :tokens])
        self._weights = [leaf(weight) for weight in inputs.weights]
        self._parameters = [leaf(inputs.A_log), leaf(inputs.dt_bias)]
        self._do = inputs.do[:, :tokens]

    def convolutions(self) -> tuple[torch.Tensor, ...]:
        """Return q, k and v behind their convolutions, ``[1, T, H K]``; as in the layer, ranks exchange once."""
        if "cp_context" in self._documents:
            return short_convolutions(self._projected, self._weights, **self._documents)
        return tuple(
            causal_conv1d(x, weight, activation="silu", **self._documents)[0]
            for x, weight in zip(self._projected, self._weights)
        )

    def _module(self) -> torch.Tensor:
        q, k, v = (y.view(self._g.shape) for y in self.convolutions())
        A_log, dt_bias = self._parameters
        o, _ = chunk_kda(
            q,
            k,
            v,
            self._g,
            self._beta,
            A_log=A_log,
            dt_bias=dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=-5.0,
            options=self._options,
            **self._documents,
        )
        return o

    def forward(self) -> torch.Tensor:
        """B1: the module's forward; returns o."""
        with torch.no_grad():
            return self._module()

    def step(self) -> tuple[torch.Tensor, ...]:
        """B3: forward, and backward with all gradients, which are returned; parameters' are this rank's part."""
        leaves = [*self._projected, self._g, self._beta, *self._weights, *self._parameters]
        return torch.autograd.grad(self._module(), leaves, self._do)

    def of(self, boundary: str) -> Callable[[], object]:
        """Return what a boundary runs."""
        return {"B1": self.forward, "B3": self.step}[boundary]


def take_arm(ctx: KcpContext, arm: str) -> None:
    """Let a context's calls use a walk from now on. Nothing that a context has made so far depends on it."""
    ctx.options = replace(ctx.options, transfer_walk=arm)


class Message(NamedTuple):
    """One exchange of a rank: bytes to and from each peer."""

    sends: dict[int, int]
    receives: dict[int, int]

    def start(self, channel: Channel, label: str, device: torch.device) -> Exchange:
        """Start an exchange of the same sizes, of whatever the memory holds."""

        def tensors(sizes: dict[int, int]) -> dict[int, torch.Tensor]:
            return {peer: torch.empty(size, dtype=torch.uint8, device=device) for peer, size in sizes.items()}

        return channel.start(tensors(self.sends), tensors(self.receives), label)


class LoopbackGroup(VirtualGroup):
    """Ranks that never meet: each receives copies of noise, of the size and at the place of others' messages."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self._noise = torch.empty(0)

    def channel(self, rank: int) -> Channel:
        """See VirtualGroup."""
        return LoopbackChannel(self, rank)

    def noise(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return so many bytes of random numbers, those of fp32."""
        if self._noise.nbytes < num_bytes or self._noise.device != device:
            self._noise = NOISE * torch.randn(-(-num_bytes // 4), device=device)
        return self._noise.view(torch.uint8)[:num_bytes]


class LoopbackChannel(Channel):
    """One rank of a LoopbackGroup. ``log`` is what it has been asked to exchange; its owner may clear it."""

    def __init__(self, group: LoopbackGroup, rank: int) -> None:
        super().__init__(rank, group.world_size)
        self.group = group
        self.log: list[Message] = []

    def prepare(self, device: torch.device) -> None:
        """See Channel; there is nothing to do."""

    def _start(self, sends, receives, label) -> Exchange:
        sizes = ({peer: tensor.nbytes for peer, tensor in tensors.items()} for tensors in (sends, receives))
        self.log.append(Message(*sizes))
        return _Loopback(self.group, receives)

    def _judge(self, topic: str, fields: dict[str, str]) -> tuple[int, str | None]:
        return 1, None


class _Loopback(Exchange):
    def __init__(self, group: LoopbackGroup, receives: dict[int, torch.Tensor]) -> None:
        self._group, self._receives = group, receives

    def wait(self) -> None:
        for tensor in self._receives.values():
            flat = tensor.view(-1).view(torch.uint8)
            flat.copy_(self._group.noise(flat.numel(), flat.device))
