"""Choose a measurement by the name of its module; each has ``main(argv) -> int``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

MEASUREMENTS = {
    "all": "every measurement that this machine can make, one file each",
    "backward": "speed and memory of a forward and backward on a CUDA device",
    "conv": "speed of the convolution on a CUDA device",
    "cp": "speed of ranks that share a pack: virtual ones on one device, or real ones under torchrun",
    "determinism": "whether chunk_kda gives the same bytes, run after run and whatever runs beside it",
    "exchanges": "the tables of docs/context-parallelism.md",
    "first_call": "what a first training step waits for: kernels compiled, cached, prebuilt",
    "forward": "speed of the forward on a CUDA device",
    "gated_norm": "speed of the gated norm on a CUDA device",
    "halos": "halos of the convolutions between real ranks, under torchrun",
    "host": "the host's time per call, on any device",
    "pairs": "the set of option combinations that the tests cover, and the pairs in it",
    "performance": "the tables of docs/performance.md, docs/numerics.md and the README, from the files of measurements",
    "precision": "errors of chunk_kda against FP64, beside their budgets",
    "timing": "forward and backward on the CPU",
    "training": "a short training run, the same on every device, and a picture of several",
    "virtual_ranks": "what walks and ranks differ by on the published packs",
    "virtual_time": "time of all virtual ranks together, over that of one device",
    "walk": "speed of the transfer walk on a CUDA device",
    "walk_precision": "errors of the transfer walk's forms against FP64",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one measurement; returns its exit code, 2 for an unknown name."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in MEASUREMENTS:
        return import_module(f"{__package__}.{argv[0]}").main(argv[1:])
    is_help = bool(argv) and argv[0] in ("-h", "--help")
    lines = "\n".join(f"  {name:15s} {what}" for name, what in MEASUREMENTS.items())
    print(f"usage: cake-kda-jit bench NAME [options]\n\n{lines}", file=sys.stdout if is_help else sys.stderr)
    return 0 if is_help else 2
