"""The demo's command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..config import BACKWARDS

HIDDEN_SIZE = 256
LAYOUTS = ("contiguous", "zigzag", "per_document_zigzag")


@dataclass(frozen=True)
class Settings:
    """What one run of the demo does; one field per option, see `make_parser`."""

    steps: int
    tokens: int
    max_length: int
    layers: int
    heads: int
    head_dim: int
    learning_rate: float
    seed: int
    text: tuple[str, ...]
    out: str
    device: str
    threads: int | None
    ranks: int
    layout: str
    backward: str | None
    json: bool


def make_parser() -> argparse.ArgumentParser:
    """Return the parser whose options are the fields of `Settings`."""
    parser = argparse.ArgumentParser(
        prog="cake-kda-jit demo",
        description="Train a small byte-level language model with Kimi Delta Attention on packed text documents, "
        "by default the Python standard library's own source. It shows the loss, where the kernels came from, and "
        "draws the loss curve. The first start compiles the kernels; later ones take them from the cache.",
    )
    add = _adder(parser)
    add("--steps", _at_least(1), 150, "optimizer steps")
    add("--tokens", _at_least(1), 1024, "tokens per step, packed from documents of any length")
    add("--max-length", _at_least(1), 512, "longer documents are cut into pieces of this many tokens")
    add("--layers", _at_least(1), 2, "blocks of attention and MLP")
    add("--heads", _at_least(1), 4, "attention heads per layer")
    add("--head-dim", int, 64, "K = V, channels per head", choices=(64, 128))
    add("--learning-rate", _positive, 5e-3, "the highest, after the warm-up")
    add("--seed", int, 0, "of the parameters and of the documents' order")
    add("--text", str, [], "files or folders to train on instead of the standard library", nargs="+", metavar="PATH")
    add("--out", str, "loss.png", "PNG file, or folder, for the loss curve", metavar="PATH")
    add("--device", str, "cpu", "torch device to train on")
    add("--threads", _at_least(1), None, "CPU threads (default: torch's, at most 2, for the model is small; 1 a rank)")
    add("--ranks", _at_least(1), 1, "processes that share every pack (context parallel), with the same loss")
    add("--layout", str, "zigzag", "how ranks share a pack", choices=LAYOUTS)
    add("--backward", str, None, "keep states for the backward, or compute them again", choices=BACKWARDS)
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and all else to stderr")
    return parser


def parse(argv: list[str]) -> Settings:
    """Read the command line; argparse exits with 2 on wrong use, with 0 after ``--help``."""
    values = vars(make_parser().parse_args(argv))
    return Settings(**{**values, "text": tuple(values["text"])})


def _adder(parser: argparse.ArgumentParser) -> Callable[..., None]:
    def add(name: str, kind: Callable[[str], Any], default: Any, text: str, **more: Any) -> None:
        shown = text if default in (None, []) else f"{text} (default {default})"
        parser.add_argument(name, type=kind, default=default, help=shown, **more)

    return add


def _at_least(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
        return value

    return integer


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
