"""Whether chunk_kda gives the same bytes: run after run, beside a busy kernel, whatever the options and neighbours.

Run ``python -m cake_kda_jit.bench determinism [--device cuda] [--runs 30] [--json FILE]``. Memory that torch hands out
uninitialised is filled with NaN, so that what a kernel reads and never wrote is seen. It prints Markdown for
docs/numerics.md; the exit code is 1 if a byte differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..ops.api import chunk_kda, transfer_walk
from ..ops.plan import make_plan
from ..ops.problem import KdaOptions
from ..ops.workspace import tile_bytes_per_head
from ..runtime.device import arch_of_device
from ..runtime.launch import last_launches
from .core import table_text
from .problems import NAMES, Problem, make_problem, output_gradients
from .tables import make_parser, print_again, publish, titled

LENGTHS, HEADS, VALUE_HEADS, HEAD_DIM = (700, 65, 1), 2, 4, 128
SEGMENT_TOKENS = 256
NEIGHBOUR = 300
"""Tokens of a document that is put before the others."""
BACKWARDS = ("saved", "replay")
Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """What was compared with the first run: ``elements`` of all outputs and gradients, of which ``differ`` differ."""

    case: str
    arm: str
    runs: int
    outputs: int
    elements: int
    differ: int


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill memory that torch hands out uninitialised with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


@contextmanager
def half_of_the_processors_busy() -> Iterator[Callable[[], None]]:
    """Give a function that starts walks on another stream: one CTA for every second processor, one CTA a processor."""
    chains, fragments = torch.cuda.get_device_properties(0).multi_processor_count // 2, 32
    M, B = (torch.zeros(chains * fragments, 1, 128, 128, device="cuda") for _ in range(2))
    offsets = torch.arange(chains + 1, device="cuda") * fragments
    stream = torch.cuda.Stream()

    def occupy(times: int = 4) -> None:
        with torch.cuda.stream(stream):
            for _ in range(times):
                transfer_walk(M, B, None, offsets)

    stream.wait_stream(torch.cuda.current_stream())
    yield occupy
    stream.synchronize()


def differing(found: Outputs, expected: Outputs) -> int:
    """Return how many elements differ in a bit: NaN equals itself, 0 does not equal -0."""
    if found.keys() != expected.keys():
        raise ValueError(f"outputs are {', '.join(found)}; compared with {', '.join(expected)}")
    count = 0
    for name, tensor in expected.items():
        whole = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        count += int((found[name].contiguous().view(whole) != tensor.contiguous().view(whole)).sum())
    return count


def step(problem: Problem, options: KdaOptions, segment_tokens: int, given: tuple | None = None) -> Outputs:
    """Return the outputs and gradients of a forward and backward; ``given`` has do and dfinal_state, else random."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in problem.leaves().items()}
    heads = {"num_heads": HEADS, "num_value_heads": VALUE_HEADS, "head_dim": HEAD_DIM}
    plan = make_plan(problem.cu_seqlens, **heads, device=leaves["v"].device, segment_tokens=segment_tokens)
    keywords = problem.keywords | {name: leaf for name, leaf in leaves.items() if name not in NAMES}
    o, final_state = chunk_kda(
        *(leaves[name] for name in NAMES), plan=plan, options=options, output_final_state=True, **keywords
    )
    do, dfinal_state = given or output_gradients(o, final_state, o.dtype)
    torch.autograd.backward([o, final_state], [do.to(o), dfinal_state.to(final_state)])
    found = {"o": o.detach(), "final_state": final_state.detach()}
    return found | {"d" + name: leaf.grad for name, leaf in leaves.items()}


def rows_of(backward: str, segment_tokens: int, runs: int, device: torch.device) -> Iterator[Row]:
    """Yield what repeats, a busy neighbour, blocks of heads, the other mode and another document change."""
    problem = make_problem(LENGTHS, heads=HEADS, value_heads=VALUE_HEADS, head_dim=HEAD_DIM).to(device)
    options = KdaOptions(backward=backward)
    first = step(problem, options, segment_tokens)
    cut = f"segments of {segment_tokens} tokens" if segment_tokens else "whole documents"
    of_tokens = {name: tensor for name, tensor in first.items() if name not in ("dA_log", "ddt_bias")}

    def row(arm: str, count: int, differ: int, compared: Outputs = first) -> Row:
        elements = sum(tensor.numel() for tensor in compared.values())
        return Row(f"{backward}, {cut}", arm, count, len(compared), elements, differ)

    yield row("again", runs, sum(differing(step(problem, options, segment_tokens), first) for _ in range(runs)))
    if device.type == "cuda":
        with half_of_the_processors_busy() as occupy:
            count = 0
            for _ in range(runs):
                occupy()
                count += differing(step(problem, options, segment_tokens), first)
        yield row("beside a kernel on half of the processors", runs, count)
    yield row("in two blocks of heads", 1, differing(_in_blocks(problem, options, segment_tokens), first))
    other = KdaOptions(backward=next(name for name in BACKWARDS if name != backward), checkpoint_tokens=128)
    yield row(f"as {other.backward}", 1, differing(step(problem, other, segment_tokens), first))
    differ = _with_a_neighbour(problem, options, segment_tokens, of_tokens)
    yield row("with another document in front", 1, differ, of_tokens)


def _in_blocks(problem: Problem, options: KdaOptions, segment_tokens: int) -> Outputs:
    """A step with scratch for one of the two groups of heads, and for half of another."""
    chunks, element = sum(-(-length // 64) for length in LENGTHS), 4 if problem.cu_seqlens.device.type == "cpu" else 2
    tensors = 1 + (options.backward == "replay")
    per_head = tile_bytes_per_head(chunks, HEAD_DIM, element, states=tensors, values=tensors)
    found = step(problem, replace(options, workspace_limit=per_head * VALUE_HEADS // HEADS * 3 // 2), segment_tokens)
    if sum(launched.program == "chunk_grad" for launched in last_launches()) != 2:
        raise RuntimeError("the limit did not give two blocks of heads; measure with another")
    return found


def _with_a_neighbour(problem: Problem, options: KdaOptions, segment_tokens: int, first: Outputs) -> int:
    """How many elements change when another document stands in front; ``first`` has no sums over the pack."""

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:, :NEIGHBOUR], tensor], dim=1)

    def more(states: torch.Tensor) -> torch.Tensor:
        return torch.cat([states[:1], states])

    do, dfinal_state = output_gradients(first["o"], first["final_state"], first["o"].dtype)
    boundaries = torch.cat([problem.cu_seqlens[:1], problem.cu_seqlens + NEIGHBOUR])
    pack = Problem(
        {name: longer(tensor) for name, tensor in problem.inputs.items()},
        problem.keywords | {"initial_state": more(problem.keywords["initial_state"])},
        boundaries,
    )
    found = step(pack, options, segment_tokens, (longer(do), more(dfinal_state)))
    states = ("final_state", "dinitial_state")
    return differing({n: found[n][1:] if n in states else found[n][:, NEIGHBOUR:] for n in first}, first)


def text_of(report: dict[str, Any]) -> str:
    """Return a report as docs/numerics.md shows it."""
    lines = []
    for row in report["rows"]:
        size = f"{row['outputs']} ({row['elements']:,} elements)"
        lines.append([row["case"], row["arm"], str(row["runs"]), size, str(row["differ"])])
    head = ["backward, cut", "compared with the first run", "runs", "outputs and gradients", "differ"]
    return titled(report, table_text(head, lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print the table; returns 1 if an element differs in a bit."""
    parser = make_parser(__name__, main.__doc__)
    parser.add_argument("--runs", type=int, default=30)
    options = parser.parse_args(argv)
    if options.table:
        return print_again(options.table, text_of)
    with poisoned_memory():
        rows = [
            row
            for backward in BACKWARDS
            for segment_tokens in (0, SEGMENT_TOKENS)
            for row in rows_of(backward, segment_tokens, options.runs, options.device)
        ]
    what = (
        f"Forward and backward, bf16, documents of {', '.join(map(str, LENGTHS))} tokens, H {HEADS}, HV {VALUE_HEADS}, "
        f"K = V = {HEAD_DIM}, fresh memory full of NaN; target {arch_of_device(options.device).name}"
    )
    publish(options, what, __name__, rows, text_of)
    return 1 if any(row.differ for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
