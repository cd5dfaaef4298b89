"""The forward's speed on a CUDA device, beside other libraries: milliseconds, nanoseconds per token-head, errors.

Run ``python -m cake_kda_jit.bench forward [--shapes T,H,DOCUMENTS,GATES ...] [--peers fla,cudnn] [--json FILE]``. The
arms of a shape run in turn, on the same tensors. Each one's o is compared with the chunk form in FP64 for two heads of
the first document's beginning. Figures of other libraries that were recorded earlier stand beside, marked so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..ops.api import chunk_kda
from ..ops.plan import make_plan
from ..reference import chunk_kda_reference
from ..runtime.launch import last_launches
from . import peers
from .core import Arm, Row, measure, print_table, write_report
from .problems import relative_error

HEAD_DIM = 128
CHECKED_TOKENS = 4096
"""Of the first document, compared with FP64: every arm's o of the first and the last head."""
STATED_BYTES = {"chunk_prepare": 768 + 2 + 1024 + 8, "chunk_scan": 1024 + 8 + 2 + 256 + 256, "segment_summary": 898}
"""Of memory traffic per token and value head that each program states, K = V = 128, 16-bit inputs; a walk's is small.

chunk_prepare reads q, k, g and beta and writes the tiles ke, qg, kg, Aqk, Tinv and decay_total; chunk_scan reads those,
v and beta and writes o; segment_summary reads ke, kg, Tinv, v and beta.
"""
SHAPES = ("8192,96,1,strong", "8192,32,1,strong", "32768,32,4,strong", "124928,32,4,strong", "131072,8,1,weak")


@dataclass(frozen=True)
class Shape:
    """T tokens in documents of unequal lengths, H = HV heads, and gates: strong (bounded by -5) or weak (near 0)."""

    tokens: int
    heads: int
    documents: int
    gates: str

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Return the shape written ``T,H,documents,gates``."""
        tokens, heads, documents, gates = text.split(",")
        if gates not in ("strong", "weak"):
            raise ValueError(f"gates are {gates!r}; use strong or weak")
        return cls(int(tokens), int(heads), int(documents), gates)

    @property
    def name(self) -> str:
        """``T 8192, H 96, 1 document, strong gates``."""
        plural = "s" if self.documents > 1 else ""
        return f"T {self.tokens}, H {self.heads}, {self.documents} document{plural}, {self.gates} gates"

    @property
    def token_heads(self) -> int:
        """T times H."""
        return self.tokens * self.heads

    def boundaries(self) -> list[int]:
        """Return document boundaries by weights 1 + 0.37 ((7 i) mod 5), lengths rounded down to 32."""
        weights = [1 + 0.37 * ((7 * i) % 5) for i in range(self.documents)]
        lengths = [int(self.tokens * weight / sum(weights)) // 32 * 32 for weight in weights]
        lengths[-1] += self.tokens - sum(lengths)
        return [sum(lengths[:i]) for i in range(self.documents + 1)]


def make_inputs(shape: Shape, device: torch.device) -> tuple[list[torch.Tensor], dict[str, object]]:
    """Return q, k, v, g, beta in bf16 and the keyword arguments: all transforms fused, a plan."""
    generator = torch.Generator(device=device).manual_seed(0)
    size = (1, shape.tokens, shape.heads, HEAD_DIM)

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=generator, device=device).to(torch.bfloat16)

    tensors = [normal(*size) for _ in range(4)] + [normal(*size[:3])]
    keywords: dict[str, object] = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    if shape.gates == "strong":
        keywords |= {
            "use_gate_in_kernel": True,
            "lower_bound": -5.0,
            "A_log": torch.zeros(shape.heads, device=device),
            "dt_bias": torch.zeros(shape.heads * HEAD_DIM, device=device),
        }
    else:
        tensors[3] = (-0.01 * torch.rand(size, generator=generator, device=device)).to(torch.bfloat16)
    keywords["plan"] = make_plan(
        torch.tensor(shape.boundaries()), num_heads=shape.heads, head_dim=HEAD_DIM, device=device
    )
    return tensors, keywords


def exact_slice(tensors: list[torch.Tensor], keywords: dict[str, object], tokens: int) -> torch.Tensor:
    """Return o of the first and the last head of the pack's first tokens, one document, in FP64."""
    heads = [0, tensors[0].shape[2] - 1]
    inputs = [tensor[:, :tokens, heads].double() for tensor in tensors]
    return chunk_kda_reference(*inputs, **some_heads(keywords, heads))[0][0]


def some_heads(keywords: dict[str, object], heads: list[int]) -> dict[str, object]:
    """Return the keyword arguments of the reference for some heads, without the plan."""
    given = {name: value for name, value in keywords.items() if name != "plan"}
    if "A_log" in given:
        bias = given["dt_bias"].view(-1, HEAD_DIM)
        given |= {"A_log": given["A_log"][heads].double(), "dt_bias": bias[heads].double()}
    return given


def our_arm(tensors: list[torch.Tensor], keywords: dict[str, object]) -> Arm:
    """Return our own arm: what ran, and the bytes that its programs state."""

    def run() -> torch.Tensor:
        with torch.no_grad():
            return chunk_kda(*tensors, **keywords)[0][0]

    run()
    launches = last_launches()
    tokens, heads = tensors[0].shape[1:3]
    # A program that runs once per block of heads runs over all of them together.
    stated = sum(STATED_BYTES.get(program, 0) for program in {one.program for one in launches})
    engine = ", ".join(f"{one.family}/{one.program}" for one in launches)
    return Arm("cake_kda_jit", engine, run, bytes=stated * tokens * heads)


def rows_of(shape: Shape, device: torch.device, options: argparse.Namespace, names: list[str]) -> list[Row]:
    """Return a row per arm: ours and those of the peers that are named."""
    tensors, keywords = make_inputs(shape, device)
    boundaries = shape.boundaries()
    arms = [our_arm(tensors, keywords), *peers.describe(peers.make_calls(names, tensors, keywords, boundaries))]
    tokens = min(CHECKED_TOKENS, boundaries[1])
    expected = exact_slice(tensors, keywords, tokens)
    arms = [replace(arm, error=relative_error(arm.run()[:tokens, [0, -1]], expected)) for arm in arms]
    times = measure(arms, device, runs=options.runs)
    rows = [Row(shape.name, arm.name, arm.engine, times[arm.name], arm.bytes or None, arm.error) for arm in arms]
    return rows + peers.recorded_rows(peers.FORWARD, shape.name, times)


def print_rows(shape: Shape, rows: list[Row]) -> None:
    """Print one shape's arms: time, time per token-head, the stated bytes over the time, error, how often ours fits."""
    lines = []
    for row in rows:
        rate = f"{row.bytes / row.ms.median * 1e-9:.2f}" if row.bytes else "-"
        per_token_head = f"{1e6 * row.ms.median / shape.token_heads:.3f}"
        error = "-" if row.error is None else f"{row.error:.1e}"
        ratio = f"{row.ms.median / rows[0].ms.median:.2f}"
        lines.append([row.arm, f"{row.ms.median:.3f}", per_token_head, rate, error, ratio, row.engine])
    print(f"\n{shape.name}\n")
    print_table(["arm", "ms", "ns per token-head", "stated TB/s", "error of o", "times ours", "engine"], lines)


def make_parser(name: str, what: str, shapes: Sequence[str]) -> argparse.ArgumentParser:
    """Return the options of a measurement of shapes, beside peers."""
    parser = argparse.ArgumentParser(prog=f"cake-kda-jit bench {name}", description=what)
    written = "T,H,documents,gates (strong or weak)"

    def shape(text: str) -> Shape:
        try:
            return Shape.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no {written}: {error}") from None

    parser.add_argument("--shapes", nargs="+", default=list(map(shape, shapes)), type=shape, help=written)
    parser.add_argument("--peers", default="", help=f"of {', '.join(peers.PACKAGES)}, with commas between")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the rows here")
    return parser


def measure_shapes(
    parser: argparse.ArgumentParser, argv: list[str], subject: tuple[str, str], rows_of: Callable, print_rows: Callable
) -> int:
    """Measure, print and write every shape; ends the program without a CUDA device.

    ``subject``: what is fast or slow, and what of chunk_kda runs. ``rows_of`` takes a shape, the device, the options
    and the peers' names, ``print_rows`` a shape and its rows.
    """
    options = parser.parse_args(argv)
    names = peers.names_of(parser, options.peers)
    if not torch.cuda.is_available():
        parser.error(f"{subject[0]} speed is measured on a CUDA device; none was found")
    device = torch.device("cuda", torch.cuda.current_device())
    rows: list[Row] = []
    for shape in options.shapes:
        found = rows_of(shape, device, options, names)
        print_rows(shape, found)
        rows += found
    if options.json:
        beside = f", beside {', '.join(names)}" if names else ""
        what = f"chunk_kda {subject[1]}, K = V = 128, bf16{beside}"
        write_report(options.json, what, parser.prog.replace("cake-kda-jit ", "cake_kda_jit."), device, rows)
    return 0


def main(argv: list[str]) -> int:
    """Measure every shape; returns 0, 2 without a CUDA device."""
    parser = make_parser("forward", __doc__.splitlines()[0], SHAPES)
    return measure_shapes(parser, argv, ("the forward's", "forward"), rows_of, print_rows)
