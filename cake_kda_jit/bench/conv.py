"""The convolution's speed: milliseconds and share of a copy's bandwidth, forward and backward.

Run ``python -m cake_kda_jit.bench conv [--json FILE] [--png FILE]`` on a CUDA device.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ..catalog import registry
from ..ops.checks import DTYPE_NAMES
from ..ops.conv import ConvInputs, conv_backward, conv_forward
from .core import BANDWIDTH_HEADER, Arm, Row, bandwidth_rows, measure, print_table, write_report

SHAPES = ("131072x12288", "131072x4096", "8192x12288", "8192x4096")
"""Tokens x channels; the first one is what FLA was measured on."""
LAYOUTS = ("4 documents", "2048 documents")


def make_boundaries(layout: str, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return cu_seqlens: lengths by the weights 1 + 0.37 ((7 i) mod 5), rounded down, the remainder to the last."""
    count = min(int(layout.split()[0]), num_tokens)
    weights = [1 + 0.37 * (7 * index % 5) for index in range(count)]
    lengths = [int(num_tokens * weight / sum(weights)) for weight in weights]
    lengths[-1] += num_tokens - sum(lengths)
    return torch.tensor([0, *lengths], device=device).cumsum(0)


def make_arms(num_tokens: int, num_channels: int, width: int, layout: str, dtype: torch.dtype, device) -> list[Arm]:
    """Return the arms of one case: forward, backward, and a copy of x for comparison."""
    x = torch.randn(num_tokens, num_channels, dtype=dtype, device=device)
    dy, target = torch.randn_like(x), torch.empty_like(x)
    weight, bias = (
        torch.randn(*shape, dtype=dtype, device=device) for shape in ((num_channels, width), (num_channels,))
    )
    boundaries = make_boundaries(layout, num_tokens, device)
    inputs = ConvInputs(x, weight, bias, None, boundaries, has_spare_rows=False, use_silu=True)
    records = {
        name: registry().get(name, DTYPE_NAMES[dtype], "smxx").name for name in ("conv_forward", "conv_backward")
    }
    return [
        Arm("copy", "torch", lambda: target.copy_(x), bytes=2 * x.nbytes),
        Arm(
            "forward",
            records["conv_forward"],
            lambda: conv_forward(inputs, output_final_state=False),
            bytes=2 * x.nbytes,
        ),
        Arm("backward", records["conv_backward"], lambda: conv_backward(inputs, dy, None), bytes=3 * x.nbytes),
    ]


def main(argv: list[str]) -> int:
    """Measure every shape; returns 0, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="cake-kda-jit bench conv", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="tokens x channels, e.g. 8192x4096")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), help='e.g. "4 documents"')
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--png", type=Path, help="draw the shares of the copy's bandwidth here")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("the convolution's speed is measured on a CUDA device; none was found")
    device = torch.device("cuda", torch.cuda.current_device())
    rows, lines = [], []
    for shape in arguments.shapes:
        num_tokens, num_channels = map(int, shape.split("x"))
        for layout in arguments.layouts:
            dtype = getattr(torch, arguments.dtype)
            arms = make_arms(num_tokens, num_channels, arguments.width, layout, dtype, device)
            times = measure(arms, device, runs=arguments.runs, flush=True)
            found, printed = bandwidth_rows(
                f"T {num_tokens}, D {num_channels}, W {arguments.width}, {layout}", arms, times
            )
            rows, lines = rows + found, lines + printed
            del arms
    print_table(BANDWIDTH_HEADER, lines)
    if arguments.json:
        write_report(arguments.json, f"causal convolution, {arguments.dtype}", "cake_kda_jit.bench conv", device, rows)
    if arguments.png:
        draw(rows, arguments.png)
    return 0


def draw(rows: list[Row], path: Path) -> None:
    """Draw each arm's bandwidth per case, in TB/s."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases, arms = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("case", "arm"))
    figure, axis = pyplot.subplots(figsize=(7, 0.7 * len(cases) + 1.5))
    for index, arm in enumerate(arms):
        chosen = [row for row in rows if row.arm == arm]
        places = [cases.index(row.case) + 0.27 * index for row in chosen]
        axis.barh(places, [row.bytes / row.ms.median / 1e9 for row in chosen], height=0.25, label=arm)
    axis.set_yticks([place + 0.27 for place in range(len(cases))], cases, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("TB/s")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
