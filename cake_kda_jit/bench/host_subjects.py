"""What ``bench host`` times: the layer and its parts, and what torch alone takes for the like."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional

from ..layers import KimiDeltaAttention
from ..ops.api import causal_conv1d, chunk_kda
from ..ops.plan import Plan, make_plan
from ..runtime.load import Kernel
from .host_graphs import GRAPHED, make_graph_calls
from .host_timing import LAUNCHES, PRODUCTS, TORCH_PRODUCTS, TURNS, Subject, turns

HEAD_DIM = 128
STACKED = 16  # layers one behind the other
CLOCKS = {PRODUCTS: TORCH_PRODUCTS, LAUNCHES: ((Kernel, "launch_all"),)}

_NOTHING = SimpleNamespace(call=lambda: None)
_CALLS = 100  # of nothing, in one


@dataclass(frozen=True)
class Setting:
    """Layers, the first one's input and the pack's two plans."""

    layers: list[KimiDeltaAttention]
    x: torch.Tensor
    plan: Plan
    capacity: Plan

    def random(self, *sizes: int) -> torch.Tensor:
        """Return a bf16 tensor ``[1, T, *sizes]`` beside x, which wants a gradient if that does."""
        tensor = torch.randn(*self.x.shape[:2], *sizes, device=self.x.device, dtype=self.x.dtype)
        return tensor.requires_grad_(self.x.requires_grad)


def make_setting(tokens: int, heads: int, hidden: int, device: torch.device, *, with_backward: bool = True) -> Setting:
    """Return bf16 layers and a pack of two documents, all on the device, with gradients if they have a backward."""
    torch.manual_seed(0)
    layers = [KimiDeltaAttention(hidden, heads, HEAD_DIM).to(device, torch.bfloat16) for _ in range(STACKED)]
    for layer in layers:
        nn.Module.requires_grad_(layer, with_backward)
    x = torch.randn(1, tokens, hidden, device=device, dtype=torch.bfloat16).requires_grad_(with_backward)
    cu_seqlens = torch.tensor([0, tokens // 3, tokens])
    sizes = {"num_heads": heads, "head_dim": HEAD_DIM, "device": device}
    plan = make_plan(cu_seqlens, **sizes)
    return Setting(layers, x, plan, make_plan(cu_seqlens, **sizes, max_documents=8, max_tokens=tokens))


def make_subjects(setting: Setting, *, compiles: bool = False) -> list[Subject]:
    """Return what is timed of torch and of this package; ``compiles`` adds the compiled layer."""
    x, layer, plan = setting.x, setting.layers[0], setting.plan
    leaves = [x, *layer.parameters()]
    subjects = [
        *_of_torch(setting),
        *_operations(setting),
        Subject("the layer", lambda: layer(x, plan=plan), leaves, clocks=CLOCKS),
        _stack(setting),
        *_between(setting),
    ]
    if x.requires_grad and x.device.type == "cuda":
        calls = make_graph_calls(layer, x, setting.capacity, setting.capacity.cu_seqlens.clone())
        subjects += [Subject(name, call, leaves if name == GRAPHED else ()) for name, call in calls.items()]
    if compiles:
        compiled = torch.compile(layer, fullgraph=True)
        subjects.append(Subject("the layer, compiled", lambda: compiled(x, plan=plan), leaves))
    return subjects if x.requires_grad else [replace(one, leaves=()) for one in subjects]


class _Node(torch.autograd.Function):
    """A node of autograd that does nothing."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _of_torch(setting: Setting) -> list[Subject]:
    rows = setting.random(setting.plan.num_heads, HEAD_DIM)

    def allocate() -> torch.Tensor:
        return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)

    def allocate_and_free() -> None:
        allocate()

    def nothing() -> None:
        for _ in range(_CALLS):
            _NOTHING.call()

    return [
        Subject(f"{TURNS:,} turns of a bare loop", turns),
        Subject("a call of nothing", nothing, count=_CALLS, clocks={", by a clock": ((_NOTHING, "call"),)}),
        Subject("torch.empty", allocate_and_free),
        Subject("torch.empty, kept", allocate),
        Subject("a node of autograd", lambda: _Node.apply(rows), [rows]),
        _projections(setting),
    ]


def _projections(setting: Setting) -> Subject:
    """The layer's nine projections, the last of which takes a tensor of its own."""
    x, y = setting.x, setting.random(setting.plan.num_heads * HEAD_DIM)
    q, k, v, decay, decay_up, beta, gate, gate_up, o = weights = [
        setting.layers[0].get_parameter(f"{name}_proj.weight")
        for name in ("q", "k", "v", "f_a", "f_b", "b", "g_a", "g_b", "o")
    ]
    linear = functional.linear

    def run() -> list[torch.Tensor]:
        found = [linear(x, weight) for weight in (q, k, v, beta)]
        return [*found, linear(linear(x, decay), decay_up), linear(linear(x, gate), gate_up), linear(y, o)]

    return Subject("the layer's nine projections alone", run, [x, y, *weights])


def _operations(setting: Setting) -> list[Subject]:
    layer, plan = setting.layers[0], setting.plan
    q, k, v, g = (setting.random(plan.num_heads, HEAD_DIM) for _ in range(4))
    beta, channels = setting.random(plan.num_heads), setting.random(plan.num_heads * HEAD_DIM)
    weight = layer.q_conv1d.weight.detach().squeeze(1).requires_grad_(channels.requires_grad)

    def attention() -> torch.Tensor:
        return chunk_kda(
            q, k, v, g, beta, A_log=layer.A_log, dt_bias=layer.dt_bias, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, plan=plan,
        )[0]  # fmt: skip

    @torch.no_grad()
    def attention_without_gradient() -> torch.Tensor:
        return attention()

    def make_another() -> Plan:
        boundaries = torch.tensor([0, q.shape[1]])
        return make_plan(boundaries, num_heads=plan.num_heads, head_dim=HEAD_DIM, device=q.device)

    return [
        Subject("make_plan", make_another),
        Subject("plan.update", lambda: setting.capacity.update(plan.cu_seqlens)),
        Subject("causal_conv1d", lambda: causal_conv1d(channels, weight, plan=plan)[0], [channels, weight]),
        Subject("chunk_kda, no gradient", attention_without_gradient),
        Subject("chunk_kda", attention, [q, k, v, g, beta, layer.A_log, layer.dt_bias]),
    ]


def _stack(setting: Setting) -> Subject:
    """Layers one behind the other, as in a model: autograd's thread is awake, and their nodes follow each other."""

    def run() -> torch.Tensor:
        rows = setting.x
        for layer in setting.layers:
            rows = layer(rows, plan=setting.plan)
        return rows

    leaves = [setting.x, *(one for layer in setting.layers for one in layer.parameters())]
    return Subject(f"a layer of a stack of {STACKED}", run, leaves, STACKED, CLOCKS)


def _between(setting: Setting) -> list[Subject]:
    """What a layer does between its projections, and the last part of that."""
    layer, plan = setting.layers[0], setting.plan
    channels, gate = (setting.random(plan.num_heads * HEAD_DIM) for _ in range(2))
    rows, beta = setting.random(plan.num_heads, HEAD_DIM), setting.random(plan.num_heads)
    given = (*[channels] * 4, beta, layer.A_log, layer.dt_bias, gate)
    own = [p for name, p in layer.named_parameters() if "proj" not in name]
    return [
        Subject(
            "the layer between its projections",
            lambda: layer.between_projections(given, is_plain=True, plan=plan),
            [channels, beta, gate, *own],
        ),
        Subject("its norm and gate alone", lambda: layer.o_norm(rows, gate), [rows, gate, layer.o_norm.weight]),
    ]
