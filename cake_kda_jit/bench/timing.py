"""Times of chunk_kda: forward, and forward and backward with each backward mode; and the memory that each mode keeps.

Run ``python -m cake_kda_jit.bench.timing [--json]``; it prints Markdown for docs/numerics.md, and ``--json`` writes a
measurement file as well.
"""

from __future__ import annotations

import argparse
import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..ops.api import chunk_kda
from ..ops.forward import context_dtype, context_shapes, kept_tiles
from ..ops.inputs import Inputs
from ..ops.plan import Plan, make_plan
from ..ops.problem import CHUNK_TOKENS, KdaOptions
from ..ops.workspace import tile_bytes
from ..programs.tile_fields import VALUE_ROWS
from .core import Arm, Row, machine, measure, print_table, write_report
from .problems import NAMES, Problem, make_problem

DEFAULT_FILE = Path("docs/measurements/cpu_timing.json")
WHAT = "chunk_kda on the cpu family: bf16, softplus gate, one document, no initial state"
SAVED, KEPT = KdaOptions("saved"), KdaOptions("saved", keep_decayed_qk=True)
REPLAY = {tokens: KdaOptions("replay", tokens) for tokens in (64, 512, 4096)}
ARMS = {"forward": None, "forward + backward, saved": SAVED, "forward + backward, replay": REPLAY[512]}
"""Each arm's options, None for a forward that keeps nothing."""


@dataclass(frozen=True)
class Shape:
    """One document of ``tokens`` tokens."""

    tokens: int
    heads: int = 4
    head_dim: int = 128

    @property
    def label(self) -> str:
        """How the shape stands in a table."""
        return f"T {self.tokens}, H = HV = {self.heads}, K = V = {self.head_dim}"


SHAPES = (Shape(512), Shape(4096))


def kept_bytes(head_dim: int, options: KdaOptions, element_bytes: int = 4) -> float:
    """Return the bytes per token and value head that a forward keeps for its backward, beside the inputs.

    For a long document without segments, whose M adds little; ``element_bytes`` is the size of a tile's element.
    """
    sizes, state = tile_bytes(1, head_dim, element_bytes), head_dim * head_dim
    prepared = sum(sizes[name] for name in kept_tiles(options))
    if options.backward == "replay":  # an fp32 state per interval
        return prepared / CHUNK_TOKENS + state * 4 / options.checkpoint_tokens
    return (prepared + (state + VALUE_ROWS[element_bytes] * head_dim) * element_bytes) / CHUNK_TOKENS  # h and v_new


def context_bytes(problem: Problem, plan: Plan, options: KdaOptions | None) -> int:
    """Return the bytes that a forward of a packed problem keeps for its backward, beside the inputs."""
    tensors = [problem.inputs[name].flatten(0, 1) for name in NAMES]
    optional = [problem.keywords.get(name) for name in ("A_log", "dt_bias", "initial_state")]
    tables = (plan.chunk_table, plan.segment_table, plan.summary_offsets, plan.num_summaries, plan.has_spare_rows)
    shapes = context_shapes(Inputs(*tensors, *optional, *tables), options)
    return sum(math.prod(shape) * context_dtype(name, shapes, plan.device).itemsize for name, shape in shapes.items())


def _step(problem: Problem, plan: Plan, options: KdaOptions | None) -> Callable[[], object]:
    if options is None:
        inputs = [problem.inputs[name] for name in NAMES]
        return lambda: chunk_kda(*inputs, plan=plan, **problem.keywords)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in problem.leaves().items()}
    keywords = problem.keywords | {name: leaf for name, leaf in leaves.items() if name not in NAMES}
    gradient = torch.randn(problem.inputs["v"].shape).to(torch.bfloat16)

    def step() -> None:
        for leaf in leaves.values():
            leaf.grad = None
        o, _ = chunk_kda(*(leaves[name] for name in NAMES), plan=plan, options=options, **keywords)
        o.backward(gradient)

    return step


def rows_of(shape: Shape, runs: int) -> list[Row]:
    """Return a row per arm, measured in turn; ``bytes`` is what the forward keeps for its backward."""
    problem = make_problem(
        (shape.tokens,), regime="softplus", heads=shape.heads, head_dim=shape.head_dim, with_state=False
    )
    plan = make_plan(problem.cu_seqlens, num_heads=shape.heads, head_dim=shape.head_dim, device="cpu")
    arms = [
        Arm(name, "cake_kda_jit, cpu", _step(problem, plan, options), context_bytes(problem, plan, options))
        for name, options in ARMS.items()
    ]
    times = measure(arms, plan.device, warmup=1, runs=runs)
    return [Row(shape.label, arm.name, arm.engine, times[arm.name], arm.bytes) for arm in arms]


def print_times(shapes: Sequence[Shape], rows: Sequence[Row]) -> None:
    """Print the times as Markdown, with their share per token and head."""
    token_heads = {shape.label: shape.tokens * shape.heads for shape in shapes}
    lines = []
    for row in rows:
        each = 1e3 * row.ms.median / token_heads[row.case]
        times = [f"{value:.1f}" for value in (row.ms.median, row.ms.min, row.ms.max)]
        lines.append([row.case, row.arm, *times, f"{each:.2f}", f"{row.bytes / 1e6:.1f}"])
    print_table(["case", "arm", "median, ms", "min", "max", "median, us per token-head", "kept, MB"], lines)


def print_memory() -> None:
    """Print as Markdown what each backward mode keeps, in bytes per token and value head, from the shapes."""
    lines = []
    for head_dim in (64, 128):
        for name, size in (("fp32", 4), ("bf16", 2)):
            cells = [f"{kept_bytes(head_dim, options, size):.0f}" for options in (KEPT, SAVED, *REPLAY.values())]
            lines.append([str(head_dim), name, *cells])
    modes = ["saved, decayed q and k", "saved", *(f"replay, {tokens} tokens" for tokens in REPLAY)]
    print_table(["K = V", "tiles", *modes], lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of times and the table of memory."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[shape.tokens for shape in SHAPES])
    parser.add_argument("--json", nargs="?", type=Path, const=DEFAULT_FILE, help=f"write a file too ({DEFAULT_FILE})")
    arguments = parser.parse_args(argv)
    shapes, device = [Shape(tokens) for tokens in arguments.tokens], torch.device("cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    try:
        rows = [row for shape in shapes for row in rows_of(shape, arguments.runs)]
        found = machine(device)
        if arguments.json is not None:
            write_report(arguments.json, WHAT, "cake_kda_jit.bench.timing", device, rows)
    finally:
        torch.set_num_threads(before)
    where = f"{found['device']}, torch {found['torch']}, {datetime.date.today()}"
    print(f"{WHAT}; {arguments.runs} runs after one; {where}.\n")
    print_times(shapes, rows)
    print()
    print_memory()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
