"""The forward's speed on a CUDA device: milliseconds and nanoseconds per token-head, whole and program by program.

Run ``python -m cake_kda_jit.bench forward [--shapes T,H,DOCUMENTS,GATES ...] [--json FILE]``.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from ..ops.api import chunk_kda
from ..ops.plan import make_plan
from ..runtime.launch import last_launches
from .core import Arm, Row, measure, print_table, write_report

HEAD_DIM = 128
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


def main(argv: list[str]) -> int:
    """Measure every shape; returns 0, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="cake-kda-jit bench forward", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), type=Shape.parse, help="T,H,documents,gates")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("the forward's speed is measured on a CUDA device; none was found")
    device = torch.device("cuda", torch.cuda.current_device())
    shapes = [Shape.parse(shape) if isinstance(shape, str) else shape for shape in arguments.shapes]
    rows, lines = [], []
    for shape in shapes:
        tensors, keywords = make_inputs(shape, device)

        def run(tensors=tensors, keywords=keywords):
            with torch.no_grad():
                return chunk_kda(*tensors, **keywords)

        run()
        engine = ", ".join(f"{one.family}/{one.program}" for one in last_launches())
        times = measure([Arm("cake_kda_jit", engine, run)], device, runs=arguments.runs)["cake_kda_jit"]
        rows.append(Row(shape.name, "cake_kda_jit", engine, times))
        per_token_head = 1e6 * times.median / (shape.tokens * shape.heads)
        lines.append([shape.name, f"{times.median:.3f}", f"{per_token_head:.3f}", engine])
    print_table(["case", "ms", "ns per token-head", "engine"], lines)
    if arguments.json:
        write_report(arguments.json, "chunk_kda forward, K = V = 128, bf16", "cake_kda_jit.bench forward", device, rows)
    return 0
