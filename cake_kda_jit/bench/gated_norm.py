"""The gated norm's speed: milliseconds and share of a copy's bandwidth, beside torch's own operators.

Run ``python -m cake_kda_jit.bench gated_norm [--json FILE]`` on a CUDA device.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ..catalog import registry
from ..ops.checks import DTYPE_NAMES
from ..ops.norm import NormInputs, norm_backward, norm_forward
from ..programs.common import variant_name
from .core import BANDWIDTH_HEADER, Arm, bandwidth_rows, measure, print_table, write_report

SHAPES = ("4096x32x128", "32768x32x128", "124928x32x128", "124928x32x64")
"""Tokens x heads x channels."""

EPS = 1e-5


def torch_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Return the gated norm by operators of torch, three in the forward, each rounding what it writes."""
    return functional.rms_norm(x, weight.shape, weight, EPS) * gate.sigmoid()


def make_arms(num_tokens: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> list[Arm]:
    """Return the arms of one case: forward and backward, both by torch too, and a copy of x for comparison."""
    x, gate, dy = (torch.randn(num_tokens, heads, head_dim, dtype=dtype, device=device) for _ in range(3))
    weight, target = torch.randn(head_dim, dtype=dtype, device=device), torch.empty_like(x)
    inputs = NormInputs(x, gate, weight, EPS)
    leaves = [tensor.detach().requires_grad_() for tensor in (x, gate, weight)]
    y = torch_norm(*leaves)
    variant = variant_name(DTYPE_NAMES[dtype], head_dim)
    forward, backward = (registry().get(f"gated_norm_{way}", variant, "smxx").name for way in ("forward", "backward"))
    return [
        Arm("copy", "torch", lambda: target.copy_(x), bytes=2 * x.nbytes),
        Arm("forward", forward, lambda: norm_forward(inputs), bytes=3 * x.nbytes),
        Arm("forward, torch", "torch", lambda: torch_norm(x, gate, weight), bytes=3 * x.nbytes),
        Arm("backward", backward, lambda: norm_backward(inputs, dy), bytes=5 * x.nbytes),
        Arm(
            "backward, torch",
            "torch",
            lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True),
            bytes=5 * x.nbytes,
        ),
    ]


def main(argv: list[str]) -> int:
    """Measure every shape; returns 0, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="cake-kda-jit bench gated_norm", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="tokens x heads x channels, e.g. 4096x32x128")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("the gated norm's speed is measured on a CUDA device; none was found")
    device = torch.device("cuda", torch.cuda.current_device())
    rows, lines = [], []
    for shape in arguments.shapes:
        num_tokens, heads, head_dim = map(int, shape.split("x"))
        arms = make_arms(num_tokens, heads, head_dim, getattr(torch, arguments.dtype), device)
        times = measure(arms, device, runs=arguments.runs, flush=True)
        found, printed = bandwidth_rows(f"T {num_tokens}, HV {heads}, D {head_dim}", arms, times)
        rows, lines = rows + found, lines + printed
        del arms
    print_table(BANDWIDTH_HEADER, lines)
    if arguments.json:
        what, script = f"gated norm, {arguments.dtype}", "cake_kda_jit.bench gated_norm"
        write_report(arguments.json, what, script, device, rows)
    return 0
