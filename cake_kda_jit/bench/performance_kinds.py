"""How docs/performance.md and the README show each measurement: titles, columns, and the rows that stand for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import performance_cp
from .first_call import ARMS as FIRST_CALL_ARMS

Json = dict[str, Any]
Cells = Callable[[Json, Json], list[str]]


@dataclass(frozen=True)
class Kind:
    """How the files of one script are shown: ``cells(row, report)`` are the columns behind those of every table.

    ``body(name, report, reports)`` is what stands in the table's place, of one file beside all.
    """

    title: str
    intro: str = ""
    columns: tuple[str, ...] = ("engine",)
    cells: Cells = lambda row, report: [row.get("engine") or "-"]
    shows: Callable[[Json], bool] = lambda row: True
    unit: str = "ms"
    body: Callable[[str, Json, dict[str, Json]], str] | None = None


def number(value: float) -> str:
    """Return a number with three significant digits, or all those before the point."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def _per_token_head(row: Json) -> str:
    sizes = dict(re.findall(r"\b(T|H) (\d+)", row["case"]))
    return f"{1e6 * row['ms']['median'] / (int(sizes['T']) * int(sizes['H'])):.2f}"


def _error(row: Json) -> str:
    error = row.get("error")
    return "-" if error is None else f"{error:.1e}"


def _host(row: Json, report: Json) -> list[str]:
    paces = (row.get(pace) for pace in ("fast", "slow"))
    return [*("-" if times is None else number(1e3 * times["median"]) for times in paces), row["engine"]]


def _times_ours(row: Json, report: Json) -> str:
    """How often our arm, the first of each case, fits into a row's time."""
    ours = next(other for other in report["rows"] if other["case"] == row["case"])
    return f"{row['ms']['median'] / ours['ms']['median']:.2f}"


def _forward(row: Json, report: Json) -> list[str]:
    return [_per_token_head(row), _times_ours(row, report), _error(row), row["engine"]]


def _backward(row: Json, report: Json) -> list[str]:
    memory = "-" if row["bytes"] is None else f"{row['bytes'] / 1e9:.2f}"
    return [_per_token_head(row), _times_ours(row, report), memory, _error(row)]


def _walk(row: Json, report: Json) -> list[str]:
    segments = int(row["case"].split()[0])
    return [f"{1e3 * time / segments:.2f}" for time in (row["ms"]["median"], row["floor"])]


def _of_a_copy(row: Json, report: Json) -> list[str]:
    [copy] = (r for r in report["rows"] if (r["case"], r["arm"]) == (row["case"], "copy"))
    found, best = (r["bytes"] / r["ms"]["median"] for r in (row, copy))
    return [f"{found / 1e9:.2f}", f"{found / best:.0%}"]


def _timing(row: Json, report: Json) -> list[str]:
    return [f"{row['bytes'] / 1e6:.1f}"]


def _first_call(row: Json, report: Json) -> list[str]:
    return [str(row["records"]), str(row["jobs"] or "-"), f"{row['load']:.1f}", row["engine"]]


def _arms(meanings: dict[str, str]) -> str:
    return "\n".join(f"- *{name}*: {what}" for name, what in meanings.items())


KINDS = {
    "forward": Kind(
        "Forward",
        "`chunk_kda` without gradients. *Strong* gates are bounded by -5, *weak* ones lie in [-0.01, 0]. The error is "
        "the relative Frobenius error against FP64, of two heads. *Times ours* is a row's time over that of our arm in "
        "the same table. *Recorded* arms are those of the section of other libraries.",
        ("ns per token and head", "times ours", "error of o", "engine"),
        _forward,
    ),
    "backward": Kind(
        "Training step",
        "`chunk_kda` forward and backward, all gradients; memory is the step's peak beside its inputs, the error that "
        "of the worst gradient, of two heads. The files have the time of each program too.",
        ("ns per token and head", "times saved", "memory, GB", "error"),
        _backward,
        lambda row: ":" not in row["arm"],
    ),
    "walk": Kind(
        "Transfer walk",
        "States through a chain of 64 fp32 summaries that lie in memory. *Floor* is what memory or the tensor cores "
        "need at least. The files have chains of other lengths too.",
        ("us per segment", "floor, us"),
        _walk,
        lambda row: row["case"].startswith("64 segments") and row["case"].endswith("memory"),
    ),
    "conv": Kind(
        "Convolution",
        "`causal_conv1d` of width 4 with SiLU, the L2 cache emptied before each run, beside a copy of the same tensor.",
        ("TB/s", "of the copy's bandwidth"),
        _of_a_copy,
    ),
    "gated_norm": Kind(
        "Norm and gate",
        "Of a layer's output, the L2 cache emptied before each run, beside a copy of x and torch's own operators. "
        "Bandwidth counts every tensor once, of torch too.",
        ("TB/s", "of the copy's bandwidth"),
        _of_a_copy,
    ),
    "cp": Kind("Context parallel", performance_cp.INTRO, body=performance_cp.body),
    "halos": Kind(
        "Halos between ranks",
        "The three convolutions of a layer, alone and in the module that is *B1* and *B3* above, of the slowest rank. "
        "*One exchange* is what a layer does: it is hidden behind the convolutions, forward.",
    ),
    "virtual_time": Kind(
        "What ranks add",
        "All virtual ranks of one device together, their hosts' time included, beside the pack on it without ranks.",
        ("times one device",),
        lambda row, report: [_times_ours(row, report)],
    ),
    "first_call": Kind(
        "First call",
        "A training step of one layer in a fresh process, from the end of `import torch` on; or a whole process that "
        "compiles. *Load* is what else the machine did, per core.\n\n" + _arms(FIRST_CALL_ARMS),
        ("kernels", "jobs", "load", "compilers"),
        _first_call,
        unit="s",
    ),
    "host": Kind(
        "Host",
        "Until a call returns, one behind the other. On a CPU its kernels are in the time, on a GPU they are not. All "
        "rows in turn; where the host had two paces, which a bare loop beside each run tells, there is a median of the "
        "runs at each. *Python time* is what torch's products and the launches leave of a call, or of its "
        "nodes of autograd. *Graphed* is `torch.cuda.make_graphed_callables`, *as a graph alone* a replay without "
        "autograd; both with the copies that another pack needs.",
        ("at the fast pace", "at the slow pace", "engine"),
        _host,
        unit="us",
    ),
    "recorded": Kind(
        "Other libraries, recorded",
        "Taken once and not in turn with our arms.",
        ("of", "engine"),
        lambda row, report: [row.get("pass", "-"), row["engine"]],
    ),
    "timing": Kind(
        "CPU",
        "The cpu family, which is written to be read. *Kept* is what a forward keeps for its backward.",
        ("kept, MB",),
        _timing,
    ),
}
FACTORS = {"s": 1e-3, "ms": 1.0, "us": 1e3}


@dataclass(frozen=True)
class Highlight:
    """A row of the README: what it is, and the row it comes from: of files that begin with ``file``."""

    what: str
    file: str
    case: str
    arm: str


LONG, PACK = "T 8192, H 96, 1 document, strong gates", "T 32768, H 32, 4 documents, strong gates"
CONV = "T 131072, D 12288, W 4, 4 documents"
TWO = "convolutions and `chunk_kda` of two ranks over NCCL, 249,856 tokens in 4 documents, 32 heads: {}"
HIGHLIGHTS = (
    Highlight("`chunk_kda` forward, 8,192 tokens, 96 heads", "forward_", LONG, "cake_kda_jit"),
    Highlight("forward, 32,768 tokens in 4 documents, 32 heads", "forward_", PACK, "cake_kda_jit"),
    Highlight("forward and backward, 8,192 tokens, 96 heads", "backward_", LONG, "saved"),
    Highlight("forward and backward, 32,768 tokens in 4 documents, 32 heads", "backward_", PACK, "saved"),
    Highlight("a state through 64 segments, 32 heads", "walk_", "64 segments, 32 heads, memory", "sm90 bf16x3_hw32"),
    Highlight("`causal_conv1d` forward, 131,072 x 12,288", "conv_", CONV, "forward"),
    Highlight("`causal_conv1d` backward, 131,072 x 12,288", "conv_", CONV, "backward"),
    Highlight(TWO.format("forward"), "cp_real_", "Q1, CP 2, contiguous, B1", "bf16x3_hw64"),
    Highlight(TWO.format("step with a replay"), "cp_real_", "Q1, CP 2, contiguous, B3", "bf16x3_hw64"),
    Highlight(
        "kernels of a training step, sm_90a, compiled from nothing", "first_call_sm", "training step", "together"
    ),
    Highlight("all shipped kernels of sm_90a, compiled from nothing", "first_call_sm", "all shipped", "shipped"),
    Highlight("first training step of a process, kernels in the cache", "first_call_", "training step", "cached"),
    Highlight("the same, prebuilt kernels and no compiler", "first_call_", "training step", "prebuilt"),
)
