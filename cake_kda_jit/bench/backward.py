"""The speed and memory of a training step of chunk_kda on a CUDA device, whole and program by program.

Run ``python -m cake_kda_jit.bench backward [--shapes T,H,DOCUMENTS,GATES ...] [--modes saved saved+qk replay]
[--peers fla,cudnn] [--workspace-limit BYTES] [--json FILE]``. The arms of a shape run in turn, on the same tensors;
saved+qk is saved with ``keep_decayed_qk``. A row of a whole step has in ``bytes`` the memory that it needs beside what
was allocated before its forward: context, workspace, o and the gradients; its error is that of the worst gradient
against FP64, for two heads of the first document's beginning. A program's row has the memory traffic that the program
states. Figures of other libraries that were recorded earlier stand beside, marked so.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import replace

import torch

from ..ops.api import chunk_kda
from ..ops.problem import CHUNK_TOKENS, KdaOptions
from ..ops.select import segment_rule
from ..reference import chunk_kda_reference_backward
from ..runtime.launch import last_launches
from . import peers
from .core import Arm, Row, Times, measure, print_table
from .forward import HEAD_DIM, Shape, make_inputs, make_parser, measure_shapes, some_heads
from .peers import Call
from .problems import relative_error

SHAPES = (
    "8192,96,1,strong",
    "8192,32,1,strong",
    "32768,32,4,strong",
    "124928,32,4,strong",
    "32768,32,1,weak",
    "131072,8,1,weak",
)
CHECKPOINT_TOKENS = 512
MODES = {
    "saved": KdaOptions(backward="saved"),
    "saved+qk": KdaOptions(backward="saved", keep_decayed_qk=True),
    "replay": KdaOptions(backward="replay", checkpoint_tokens=CHECKPOINT_TOKENS),
}
CHECKED_TOKENS = 2048
"""Of the first document, compared with FP64: every gradient of the first and the last head."""
SEGMENT_TOKENS = segment_rule(8, HEAD_DIM).tokens_of(131_072)
"""What the segment rule cuts the shape with few heads into."""

# Bytes of a token: its channels in bf16, and in the two parts of v' and of z; its share of a chunk's [V, K] and
# [64, 64] in bf16 and of its [K] in fp32; its share of a segment's [K, V] in fp32.
ROW = 2 * HEAD_DIM
VALUE_ROW, GRADIENT_ROW = 4 * HEAD_DIM, 3 * HEAD_DIM
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
    kept = checkpoints if replays else STATE_TILE + VALUE_ROW
    inputs = 3 * ROW + 2
    again = 0 if MODES[mode].keep_decayed_qk else inputs + tiles - (SQUARE if replays else 2 * SQUARE)
    replay = (2 * ROW + SQUARE + DECAY) + ROW + 2 + STATE_TILE + VALUE_ROW + checkpoints
    summary = 2 * ROW + SQUARE + DECAY + 2
    return {
        "chunk_prepare": inputs + tiles + again,
        "segment_summary": 2 * summary + ROW + (tiles + ROW + 2) + 3 * MATRIX_SHARE,
        "transfer_walk": 6 * MATRIX_SHARE,
        "chunk_scan": tiles + 2 * ROW + 2 + kept,
        "grad_scan": tiles + ROW + 2 + STATE_TILE + GRADIENT_ROW + (replay if replays else 0),
        "chunk_grad": 4 * ROW + 2 + 2 * STATE_TILE + VALUE_ROW + GRADIENT_ROW + 4 * ROW + 2 + 8,
        "parameter_reduce": 8,
    }


def our_call(tensors: list[torch.Tensor], keywords: dict[str, object], options: KdaOptions) -> Call:
    """Return chunk_kda with some options as a call."""
    parameters = tuple(keywords[name] for name in ("A_log", "dt_bias") if name in keywords)

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        # [0] would make the backward fill a tensor with zeros and copy the gradient into it, 4 % of a step.
        return chunk_kda(*inputs, **keywords, options=options)[0].flatten(0, 1)

    return Call("cake_kda_jit", tuple(tensors), run, keywords, parameters)


def make_step(call: Call) -> Callable[[], None]:
    """Return a function that runs one forward and backward; every tensor that can gets a gradient, and frees it."""
    leaves = (*call.inputs, *call.parameters)
    for leaf in leaves:
        leaf.requires_grad_()
    v = call.inputs[2]
    gradient = torch.randn_like(v.view(v.shape[-3:]))

    def step() -> None:
        call.run(*call.inputs).backward(gradient)
        for leaf in leaves:
            leaf.grad = None

    return step


def gradient_error(call: Call, tokens: int) -> float:
    """Return the worst relative error of dq, dk, dv, dg and dbeta, of two heads of the first tokens of a document.

    do is 0 behind them, so the document may as well end there: what follows has no part in these gradients.
    """
    for tensor in call.inputs:
        tensor.requires_grad_()
    o = call.run(*call.inputs)
    heads = [0, o.shape[1] - 1]
    do = torch.zeros_like(o)
    do[:tokens] = torch.randn_like(do[:tokens])
    o.backward(do)

    def part(tensor: torch.Tensor) -> torch.Tensor:
        batch = tensor.detach() if call.inputs[0].dim() == 4 else tensor.detach()[None]
        return batch[:, :tokens, heads].double()

    last = do[None, :tokens, heads].double()
    exact = chunk_kda_reference_backward(*map(part, call.inputs), do=last, **some_heads(call.keywords, heads))
    errors = []
    for tensor, expected in zip(call.inputs, (exact.dq, exact.dk, exact.dv, exact.dg, exact.dbeta)):
        errors.append(relative_error(part(tensor.grad), expected))
        tensor.grad = None
    for parameter in call.parameters:
        parameter.grad = None
    return max(errors)


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


def rows_of(shape: Shape, device: torch.device, options: argparse.Namespace, names: list[str]) -> list[Row]:
    """Return the rows of whole steps, ours in each mode and the peers', then those of our programs, by falling time."""
    tensors, keywords = make_inputs(shape, device)
    limit = options.workspace_limit
    calls = {mode: our_call(tensors, keywords, replace(MODES[mode], workspace_limit=limit)) for mode in options.modes}
    others = peers.make_calls(names, tensors, keywords, shape.boundaries())
    tokens, arms = min(CHECKED_TOKENS, shape.boundaries()[1]), []
    for name, call in (calls | others).items():
        step = make_step(call)
        step()  # compiles, and tunes where a peer does
        engine = f"{call.library}; {peers.kernels_of(step)}" if name in others else _programs()
        memory = extra_bytes(step, device)
        arms.append(Arm(name, engine, step, memory, gradient_error(call, tokens)))
    times = measure(arms, device, runs=options.runs)
    rows = [Row(shape.name, arm.name, arm.engine, times[arm.name], arm.bytes, arm.error) for arm in arms]
    rows += peers.recorded_rows(peers.STEP, shape.name, times)
    for arm in arms[: len(calls)]:
        stated = stated_bytes(arm.name)
        for program, spent in sorted(program_times(arm.run, 3).items(), key=lambda item: -item[1].median):
            traffic = int(stated[program] * shape.token_heads) if program in stated else None
            rows.append(Row(shape.name, f"{arm.name}: {program}", program, spent, traffic))
    return rows


def _programs() -> str:
    """What the last backward launched."""
    return ", ".join(f"{one.family}/{one.program}" for one in last_launches())


def print_rows(shape: Shape, rows: list[Row]) -> None:
    """Print one shape: ms, ns per token-head, memory or the traffic achieved, error, how often the first arm fits."""
    lines = []
    for row in rows:
        per_token_head = f"{1e6 * row.ms.median / shape.token_heads:.3f}"
        if row.bytes is None:
            note = "-"
        elif ":" in row.arm:
            note = f"{1e-6 * row.bytes / row.ms.median:.0f} GB/s"
        else:
            note = f"{1e-9 * row.bytes:.2f} GB of memory"
        error = "-" if row.error is None else f"{row.error:.1e}"
        ratio = f"{row.ms.median / rows[0].ms.median:.2f}"
        lines.append([row.arm, f"{row.ms.median:.3f}", per_token_head, note, error, ratio])
    print(f"\n{shape.name}\n")
    head = ["arm", "ms", "ns per token-head", "memory, or stated bytes / time", "error", f"times {rows[0].arm}"]
    print_table(head, lines)


def main(argv: list[str]) -> int:
    """Measure every shape in every mode; returns 0, 2 without a CUDA device."""
    parser = make_parser("backward", __doc__.splitlines()[0], SHAPES)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--workspace-limit", type=int, help="bytes of scratch; else the default of chunk_kda")
    return measure_shapes(parser, argv, ("a training step's", "forward and backward"), rows_of, print_rows)
