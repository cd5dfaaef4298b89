"""The transfer walk's speed: microseconds per segment, beside the floor of memory and tensor cores.

Run ``python -m cake_kda_jit.bench walk [--json FILE] [--png FILE]`` on a CUDA device. Summaries lie in memory, and are
timed once more where they fit the L2 cache.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ..arch import Arch
from ..catalog import registry
from ..record import Record
from ..runtime.device import arch_of_device
from ..runtime.launch import launch
from .core import Arm, Row, measure, print_table, write_report

HEAD_DIM = 128
MEMORY_FLOOR_NS = 46.0
"""Per head and segment: 192 KiB of M, B and entry at the 4.2 TB/s that a copy reaches on an H200."""
L2_BYTES = 36 << 20
"""M and B up to this size are still in the L2 cache of an H200, 60 MB, when a walk ends that also writes entry."""
FLOPS_PER_SM = {"smxx": 623e12 / 132, "sm90": 972e12 / 132}
"""bf16 products on one SM of an H200, measured: mma.sync; wgmma with its left factor in registers."""


def floor_us(record: Record, num_heads: int, num_sms: int) -> float:
    """Return the larger of the memory floor and the tensor floor of one segment of one chain, in microseconds.

    The tensor floor is that of the busiest SM: its CTAs' products, each an ``num_terms`` fold one; TF32 runs at half
    the rate of bf16.
    """
    constants = record.constants
    width = min(constants["value_width"], HEAD_DIM)
    ctas = num_heads * HEAD_DIM // width
    flops = 2 * HEAD_DIM * HEAD_DIM * width * constants["num_terms"] * (1 if constants["split"] == "bf16x3" else 2)
    tensor = -(-ctas // num_sms) * flops / FLOPS_PER_SM[record.family] * 1e6
    return max(MEMORY_FLOOR_NS * num_heads * 1e-3, tensor)


def walk_values(tensors: dict[str, torch.Tensor], transpose: bool) -> dict[str, object]:
    """Return the arguments of a walk over one chain: M, B, initial, offsets, entry and exit of all heads."""
    _, num_heads, head_dim, _ = tensors["B"].shape
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    return addresses | {
        "num_chains": 1,
        "num_value_heads": num_heads,
        "first_head": 0,
        "num_block_heads": num_heads,
        "head_dim": head_dim,
        "transpose": int(transpose),
    }


def make_tensors(num_segments: int, num_heads: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return one chain of random contractions, and what a walk along it writes."""
    shape = (num_segments, num_heads, HEAD_DIM, HEAD_DIM)
    B = torch.randn(shape, device=device)
    return {
        "M": torch.randn(shape, device=device) * (0.5 / HEAD_DIM**0.5),
        "B": B,
        "initial": B[:1],
        "offsets": torch.tensor([0, num_segments], device=device),
        "entry": torch.empty_like(B),
        "exit": torch.empty_like(B[:1]),
    }


def make_arm(record: Record, tensors: dict[str, torch.Tensor], transpose: bool) -> Arm:
    """Return the arm of one form. All arms walk the same chain, so that one leaves it in L2 for the next."""
    values, B = walk_values(tensors, transpose), tensors["B"]
    return Arm(
        f"{record.family} {record.variant}",
        record.name,
        lambda: launch(record, "bench", values, B.device),
        bytes=3 * B.nbytes,
    )


def choose_records(arch: Arch, forms: list[str] | None) -> list[Record]:
    """Return the walk's records that build for a target, best family first; those of some forms if forms are given."""
    records = [r for r in registry().records() if r.program == "transfer_walk" and arch.name in r.archs]
    found = [r for r in records if forms is None or r.variant in forms]
    return sorted(found, key=lambda record: arch.families.index(record.family))


@dataclass(frozen=True)
class WalkRow(Row):
    """``floor``: the milliseconds that memory and tensor cores need at least, see ``floor_us``."""

    segments: int = 0
    heads: int = 0
    floor: float = 0.0


def rows_of(records: list[Record], segments: int, heads: int, device: torch.device, options) -> list[WalkRow]:
    """Return a row per record for one chain: summaries in memory, and in L2 too where they fit."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    tensors = make_tensors(segments, heads, device)
    arms = [make_arm(record, tensors, options.transpose) for record in records]
    fits = tensors["M"].nbytes + tensors["B"].nbytes <= L2_BYTES
    rows = []
    for where in ("L2", "memory") if fits else ("memory",):
        times = measure(arms, device, runs=options.runs, flush=where == "memory")
        case = f"{segments} segments, {heads} heads, {where}"
        for record, arm in zip(records, arms):
            floor = floor_us(record, heads, num_sms) * segments * 1e-3
            sizes = {"segments": segments, "heads": heads, "floor": floor}
            rows.append(WalkRow(case, arm.name, arm.engine, times[arm.name], arm.bytes, **sizes))
    return rows


def main(argv: list[str]) -> int:
    """Measure every form; returns 0, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="cake-kda-jit bench walk", description=__doc__.splitlines()[0])
    parser.add_argument("--segments", type=int, nargs="+", default=[8, 16, 64, 256])
    parser.add_argument("--heads", type=int, nargs="+", default=[32, 96])
    parser.add_argument("--forms", nargs="+", help="variants, of every family that has them; left out: all")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--transpose", action="store_true")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--png", type=Path, help="draw microseconds per segment here")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("the walk's speed is measured on a CUDA device; none was found")
    device = torch.device("cuda", torch.cuda.current_device())
    records = choose_records(arch_of_device(device), options.forms)
    cases = [(heads, segments) for heads in options.heads for segments in options.segments]
    rows = [row for heads, segments in cases for row in rows_of(records, segments, heads, device, options)]
    print_rows(rows)
    if options.json:
        direction = "transposed" if options.transpose else "forward"
        write_report(options.json, f"transfer walk, {direction}, K = V = 128", "cake_kda_jit.bench walk", device, rows)
    if options.png:
        draw(rows, options.png)
    return 0


def print_rows(rows: list[WalkRow]) -> None:
    """Print microseconds per segment beside the floor, and how the forms compare in each case."""
    lines = []
    for row in rows:
        found, floor = (1e3 * time / row.segments for time in (row.ms.median, row.floor))
        lines.append([row.case, row.arm, f"{found:.2f}", f"{floor:.2f}", f"{floor / found:.0%}"])
    print_table(["case", "form", "us per segment", "floor us", "share"], lines)
    print_ratio(rows)


def form_of(row: WalkRow) -> str:
    """Return family and splitting of a row's arm, without its width."""
    return re.sub(r"_hw\d+$", "", row.arm)


def print_ratio(rows: list[WalkRow]) -> None:
    """Print how much longer the fastest tf32_hilo takes than the fastest bf16x3, per case."""
    for case in dict.fromkeys(row.case for row in rows):
        best: dict[str, float] = {}
        for row in rows:
            splitting = form_of(row).split()[1]
            if row.case == case:
                best[splitting] = min(row.ms.median, best.get(splitting, row.ms.median))
        if {"tf32_hilo", "bf16x3"} <= best.keys():
            print(f"{case}: tf32_hilo / bf16x3 = {best['tf32_hilo'] / best['bf16x3']:.2f}")


def draw(rows: list[WalkRow], path: Path) -> None:
    """Draw microseconds per segment over the number of segments: a panel per head count, a line per family and form.

    Of several widths the fastest is shown.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    head_counts = sorted({row.heads for row in rows})
    figure, axes = pyplot.subplots(1, len(head_counts), figsize=(5.5 * len(head_counts), 4), squeeze=False)
    for axis, num_heads in zip(axes[0], head_counts):
        for form in dict.fromkeys(form_of(row) for row in rows):
            best: dict[int, float] = {}
            for row in rows:
                if (form_of(row), row.heads) == (form, num_heads) and row.case.endswith("memory"):
                    found = 1e3 * row.ms.median / row.segments
                    best[row.segments] = min(found, best.get(row.segments, found))
            axis.plot(list(best), list(best.values()), "o-", label=form)
        axis.axhline(MEMORY_FLOOR_NS * num_heads * 1e-3, color="gray", linestyle=":", label="memory floor")
        axis.set(
            title=f"{num_heads} heads, summaries in memory", xlabel="segments", ylabel="us per segment", xscale="log"
        )
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
