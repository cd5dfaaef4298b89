"""The host's time per call: from a call to its return, nothing waited for, a few calls one behind the other.

Run ``python -m cake_kda_jit.bench host [--device cuda] [--tokens 4096] [--heads 32] [--compile] [--peers fla]
[--json FILE]``.

On a CUDA device a call returns when its launches are queued, so this is what Python and torch cost; a layer whose
kernels take less waits for its host. Each run begins with an idle device and is a burst of calls, few enough that the
device's queue takes all of them, behind one that is not counted: a call behind a synchronisation finds a processor that
has just been asleep. On a CPU the kernels themselves are in it: few tokens and heads there.

Beside the calls stands what torch alone takes on that host: an allocation, an empty node of autograd and its backward,
which on a CUDA device wakes another thread, and the layer's nine projections. On a CUDA device the layer stands there
in CUDA graphs too. With ``--compile`` it is also compiled, which takes some ten seconds before the first row.

Two rows say what of the layer's time is spent here and not in torch. *Outside of functional.linear* is a forward less
what its nine projections take inside ``torch.nn.functional.linear``. *Inside its nodes* is what a backward takes from
the entry of a node of autograd written in Python to its exit; the rest are the engine, its thread, and the gradients of
the projections, which are torch's own. The clocks themselves are in both. ``--peers fla`` adds the same rows of a layer
of flash-linear-attention's parts (``host_peers``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from ..layers import KimiDeltaAttention
from ..ops.api import causal_conv1d, chunk_kda
from ..ops.plan import Plan, make_plan
from .core import Row, machine, print_table, write_report
from .host_graphs import GRAPHED, make_graph_calls
from .host_peers import measure_fla
from .host_timing import Differentiated, measure_shares, time_backward, timed
from .peers import names_of

HEAD_DIM = 128
WHAT = "host time per call"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj")


@dataclass(frozen=True)
class Setting:
    """A layer, its input and the pack's two plans."""

    layer: KimiDeltaAttention
    x: torch.Tensor
    plan: Plan
    capacity: Plan

    @property
    def num_heads(self) -> int:
        """H."""
        return self.plan.num_heads


def make_setting(tokens: int, heads: int, hidden: int, device: torch.device) -> Setting:
    """Return a bf16 layer and a pack of two documents, all on the device."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(hidden, heads, HEAD_DIM).to(device, torch.bfloat16)
    x = torch.randn(1, tokens, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    cu_seqlens = torch.tensor([0, tokens // 3, tokens])
    sizes = {"num_heads": heads, "head_dim": HEAD_DIM, "device": device}
    plan = make_plan(cu_seqlens, **sizes)
    return Setting(layer, x, plan, make_plan(cu_seqlens, **sizes, max_documents=8, max_tokens=tokens))


class _Nothing(torch.autograd.Function):
    """A node that does nothing."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def make_calls(setting: Setting) -> tuple[dict[str, Callable[[], object]], dict[str, list[torch.Tensor]]]:
    """Return the calls that are timed, by name, and what those that have a backward differentiate."""
    layer, x, plan = setting.layer, setting.x, setting.plan
    device, tokens = x.device, x.shape[1]
    size = (1, tokens, setting.num_heads, HEAD_DIM)
    q, k, v, g = (torch.randn(size, device=device).bfloat16().requires_grad_() for _ in range(4))
    beta = torch.randn(size[:3], device=device).bfloat16().requires_grad_()
    channels, gate = (q.flatten(2).detach().clone().requires_grad_() for _ in range(2))
    weight = layer.q_conv1d.weight.detach().squeeze(1).requires_grad_()
    weights = [getattr(layer, name).weight for name in PROJECTIONS]
    inner = torch.randn(1, tokens, HEAD_DIM, device=device, dtype=torch.bfloat16)

    def attention() -> torch.Tensor:
        return chunk_kda(
            q, k, v, g, beta, A_log=layer.A_log, dt_bias=layer.dt_bias, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, plan=plan,
        )[0]  # fmt: skip

    def attention_without_gradient() -> torch.Tensor:
        with torch.no_grad():
            return attention()

    def projections() -> list[torch.Tensor]:
        given = {HEAD_DIM: inner, x.shape[2]: x}
        return [functional.linear(given.get(weight.shape[1], channels), weight) for weight in weights]

    def between_projections() -> torch.Tensor:
        given = (*[channels] * 4, beta, layer.A_log, layer.dt_bias, gate)
        return layer.between_projections(given, is_plain=True, plan=plan)

    calls = {
        "torch.empty": lambda: torch.empty(size, dtype=torch.bfloat16, device=device),
        "a node of autograd": lambda: _Nothing.apply(q),
        "chunk_kda, no gradient": attention_without_gradient,
        "chunk_kda": attention,
        "causal_conv1d": lambda: causal_conv1d(channels, weight, plan=plan)[0],
        "the layer": lambda: layer(x, plan=plan),
        "the layer between its projections": between_projections,
        "its norm and gate alone": lambda: layer.o_norm(q, gate),
        "the layer's nine projections alone": projections,
        "plan.update": lambda: setting.capacity.update(plan.cu_seqlens),
        "make_plan": lambda: make_plan(
            torch.tensor([0, tokens]), num_heads=setting.num_heads, head_dim=HEAD_DIM, device=device
        ),
    }
    own = [p for name, p in layer.named_parameters() if "proj" not in name]
    leaves = {
        "a node of autograd": [q],
        "chunk_kda": [q, k, v, g, beta, layer.A_log, layer.dt_bias],
        "causal_conv1d": [channels, weight],
        "the layer": [x, *layer.parameters()],
        "the layer between its projections": [channels, beta, gate, *own],
        "its norm and gate alone": [q, gate, layer.o_norm.weight],
        "the layer's nine projections alone": [x, *weights],
    }
    return calls, leaves


def add_other_forms(setting: Setting, calls: dict, leaves: dict, *, compiles: bool) -> None:
    """Add the layer in CUDA graphs, on a device that has them, and compiled, to what ``make_calls`` returns."""
    layer, x, plan, capacity = setting.layer, setting.x, setting.plan, setting.capacity
    if x.device.type == "cuda":
        calls |= make_graph_calls(layer, x, capacity, capacity.cu_seqlens.clone())
        leaves[GRAPHED] = leaves["the layer"]
    if compiles:
        compiled = torch.compile(layer, fullgraph=True)
        calls["the layer, compiled"] = lambda: compiled(x, plan=plan)
        leaves["the layer, compiled"] = leaves["the layer"]


def measure_host(
    setting: Setting, runs: int, burst: int, case: str, *, with_backward: bool, compiles: bool = False
) -> list[Row]:
    """Return a row per call, and one per backward of those that have one; ``compiles`` adds the compiled layer."""
    device = setting.x.device
    calls, leaves = make_calls(setting)
    if with_backward:
        add_other_forms(setting, calls, leaves, compiles=compiles)
    else:
        nn.Module.requires_grad_(setting.layer, False)
        setting.x.requires_grad_(False)
        del calls["chunk_kda"], calls["a node of autograd"]
    found = {name: timed(lambda _, call=call: call(), device, runs, burst) for name, call in calls.items()}
    layer = Differentiated(calls["the layer"], leaves["the layer"])
    shares = measure_shares(layer, device, runs, burst, with_backward=with_backward)
    found |= {f"the layer{share}": times for share, times in shares.items()}
    for name, inputs in leaves.items() if with_backward else ():
        found[f"{name}, backward"] = time_backward(Differentiated(calls[name], inputs), device, runs)
    return [Row(case, name, "cake_kda_jit", times) for name, times in found.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table of microseconds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--burst", type=int, default=10, help="calls per run")
    parser.add_argument("--forward-only", action="store_true", help="where no record has a gradient")
    parser.add_argument("--compile", action="store_true", help="the compiled layer too")
    parser.add_argument("--peers", default="", help="fla: a layer of its parts too, on kernels that do nothing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    peers = names_of(parser, arguments.peers, ("fla",))
    device = torch.device(arguments.device)
    setting = make_setting(arguments.tokens, arguments.heads, arguments.hidden, device)
    case = f"T {arguments.tokens}, H {arguments.heads}, hidden {arguments.hidden}"
    with_backward = not arguments.forward_only
    rows = measure_host(
        setting, arguments.runs, arguments.burst, case, with_backward=with_backward, compiles=arguments.compile
    )
    if peers:
        rows += measure_fla(setting.plan, setting.x, arguments.runs, arguments.burst, case)
    if arguments.json is not None:
        write_report(arguments.json, WHAT, "cake_kda_jit.bench.host", device, rows)
    bursts = f"{arguments.runs} runs of {arguments.burst} calls"
    print(f"{WHAT}, us; {case}; {bursts}; {machine(device)['device']}, torch {torch.__version__}.\n")
    lines = [[row.arm, *(f"{1e3 * value:.1f}" for value in (row.ms.median, row.ms.min))] for row in rows]
    print_table(["call", "median", "min"], lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
