"""The speed and memory of a training step of chunk_kda on a CUDA device, whole and program by program.

Run ``python -m cake_kda_jit.bench backward [--shapes T,H,DOCUMENTS,GATES ...] [--modes saved replay]
[--workspace-limit BYTES] [--json FILE]``.
A row of a whole step has in ``bytes`` the memory that it needs beside what was allocated before its forward: context,
workspace, o and the gradients. A program's row has the memory traffic that the program states.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import torch

from ..ops.api import chunk_kda
from ..ops.problem import CHUNK_TOKENS, KdaOptions
from ..runtime.launch import last_launches
from .core import Arm, Row, Times, measure, print_table, write_report
from .forward import HEAD_DIM, Shape, make_inputs

SHAPES = (
    "8192,96,1,strong",
    "8192,32,1,strong",
    "32768,32,4,strong",
    "124928,32,4,strong",
    "32768,32,1,weak",
    "131072,8,1,weak",
)
MODES = ("saved", "replay")
CHECKPOINT_TOKENS = 512
SEGMENT_TOKENS = 2048
"""What documents are cut into where the shape's heads are few: the default of the segment rule."""

# Bytes of a token: its channels in bf16; its share of a chunk's [V, K] and [64, 64] in bf16 and of its [K] in fp32; its
# share of a segment's [K, V] in fp32.
ROW = 2 * HEAD_DIM
STATE_TILE = 2 * HEAD_DIM * HEAD_DIM // CHUNK_TOKENS
SQUARE = 2 * CHUNK_TOKENS
DECAY = 4 * HEAD_DIM // CHUNK_TOKENS
MATRIX_SHARE = 4 * HEAD_DIM * HEAD_DIM / SEGMENT_TOKENS


def stated_bytes(mode: str) -> dict[str, float]:
    """Return the memory traffic of each program in one step, bytes per token-head at K = V = 128 in bf16.

    Each tensor counts once per launch that reads or writes it. Where a program runs in the forward and in the backward
    its launches are added.
    """
    replays = mode == "replay"
    checkpoints = 4 * HEAD_DIM * HEAD_DIM / CHECKPOINT_TOKENS
    tiles = 3 * ROW + 2 * SQUARE + DECAY
    kept = checkpoints if replays else STATE_TILE + ROW
    inputs = 3 * ROW + 2
    again = tiles - (SQUARE if replays else 2 * SQUARE)
    replay = (2 * ROW + SQUARE + DECAY) + ROW + 2 + STATE_TILE + ROW + checkpoints
    summary = 2 * ROW + SQUARE + DECAY + 2
    return {
        "chunk_prepare": inputs + tiles + inputs + again,
        "segment_summary": 2 * summary + ROW + (tiles + ROW + 2) + 3 * MATRIX_SHARE,
        "transfer_walk": 6 * MATRIX_SHARE,
        "chunk_scan": tiles + 2 * ROW + 2 + kept,
        "grad_scan": tiles + ROW + 2 + STATE_TILE + ROW + (replay if replays else 0),
        "chunk_grad": 5 * ROW + 2 + 2 * STATE_TILE + 2 * ROW + 4 * ROW + 2 + 8,
        "parameter_reduce": 8,
    }


def make_step(shape: Shape, mode: str, device: torch.device, workspace_limit: int | None = None) -> Callable[[], None]:
    """Return a function that runs one forward and backward; every tensor that can gets a gradient, and frees it."""
    tensors, keywords = make_inputs(shape, device)
    parameters = {name: keywords[name] for name in ("A_log", "dt_bias") if name in keywords}
    leaves = [*tensors, *parameters.values()]
    for leaf in leaves:
        leaf.requires_grad_()
    options = KdaOptions(backward=mode, checkpoint_tokens=CHECKPOINT_TOKENS, workspace_limit=workspace_limit)
    gradient = torch.randn_like(tensors[2])

    def step() -> None:
        o, _ = chunk_kda(*tensors, **keywords, options=options)
        o.backward(gradient)
        for leaf in leaves:
            leaf.grad = None

    return step


def extra_bytes(step: Callable[[], None], device: torch.device) -> int:
    """Return the step's peak memory beyond what is allocated before it: no gradient is left from a step before."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def program_times(step: Callable[[], None], runs: int) -> dict[str, Times]:
    """Return the milliseconds of each program's kernels in a step, "other" for those that are not ours."""
    found: dict[str, list[float]] = {}
    for _ in range(runs):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        spent: dict[str, float] = {}
        for event in profile.key_averages():
            kernel = re.search(r"([a-z]\w*?)__\w+__kernel", event.key)
            program = kernel.group(1) if kernel else "other"
            spent[program] = spent.get(program, 0.0) + 1e-3 * event.self_device_time_total
        for program, milliseconds in spent.items():
            found.setdefault(program, []).append(milliseconds)
    return {
        program: Times(sorted(values)[len(values) // 2], min(values), max(values), len(values))
        for program, values in found.items()
    }


def rows_of(shape: Shape, mode: str, device: torch.device, runs: int, workspace_limit: int | None = None) -> list[Row]:
    """Return the row of a whole step, then one per program, by falling time."""
    step = make_step(shape, mode, device, workspace_limit)
    step()
    engine = ", ".join(f"{one.family}/{one.program}" for one in last_launches())
    memory = extra_bytes(step, device)
    times = measure([Arm(mode, engine, step)], device, runs=runs)[mode]
    rows = [Row(shape.name, mode, engine, times, memory)]
    stated = stated_bytes(mode)
    for program, spent in sorted(program_times(step, 3).items(), key=lambda item: -item[1].median):
        traffic = int(stated[program] * shape.tokens * shape.heads) if program in stated else None
        rows.append(Row(shape.name, f"{mode}: {program}", program, spent, traffic))
    return rows


def print_rows(shape: Shape, rows: list[Row]) -> None:
    """Print a table of one shape and mode: ms, ns per token-head, and memory or the traffic that was achieved."""
    lines = []
    for row in rows:
        per_token_head = 1e6 * row.ms.median / (shape.tokens * shape.heads)
        if ":" not in row.arm:
            note = f"{1e-9 * row.bytes:.2f} GB of memory"
        else:
            note = f"{1e-6 * row.bytes / row.ms.median:.0f} GB/s" if row.bytes else "-"
        lines.append([row.case, row.arm, f"{row.ms.median:.3f}", f"{per_token_head:.3f}", note])
    print_table(["case", "arm", "ms", "ns per token-head", "memory, or stated bytes / time"], lines)


def main(argv: list[str]) -> int:
    """Measure every shape in every mode; returns 0, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="cake-kda-jit bench backward", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), type=Shape.parse, help="T,H,documents,gates")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--workspace-limit", type=int, help="bytes of scratch; else the default of chunk_kda")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("a training step's speed is measured on a CUDA device; none was found")
    device = torch.device("cuda", torch.cuda.current_device())
    rows: list[Row] = []
    for shape in (Shape.parse(shape) if isinstance(shape, str) else shape for shape in arguments.shapes):
        for mode in arguments.modes:
            found = rows_of(shape, mode, device, arguments.runs, arguments.workspace_limit)
            print_rows(shape, found)
            rows += found
    if arguments.json:
        what = "chunk_kda forward and backward, K = V = 128, bf16"
        write_report(arguments.json, what, "cake_kda_jit.bench backward", device, rows)
    return 0
