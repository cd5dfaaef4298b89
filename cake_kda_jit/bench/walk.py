"""The transfer walk's speed: microseconds per segment, beside the floor of memory and tensor cores.

Run ``python -m cake_kda_jit.bench walk [--json FILE] [--png FILE]`` on a CUDA device.
"""

from __future__ import annotations

import argparse
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
FLOPS_PER_SM = {"smxx": 623e12 / 132, "sm90": 972e12 / 132}
"""bf16 products on one SM of an H200, measured: mma.sync; wgmma with its left factor in registers."""


def floor_us(record: Record, num_heads: int, num_sms: int) -> float:
    """Return the larger of the memory floor and the tensor floor of one segment, in microseconds.

    The tensor floor is that of the busiest SM: its CTAs' products, each an ``num_terms`` fold one; TF32 runs at half
    the rate of bf16.
    """
    constants = record.constants
    width = min(constants["value_width"], HEAD_DIM)
    ctas = num_heads * HEAD_DIM // width
    flops = 2 * HEAD_DIM * HEAD_DIM * width * constants["num_terms"] * (1 if constants["split"] == "bf16x3" else 2)
    tensor = -(-ctas // num_sms) * flops / FLOPS_PER_SM[record.family] * 1e6
    return max(MEMORY_FLOOR_NS * num_heads * 1e-3, tensor)


def make_arm(record: Record, num_segments: int, num_heads: int, device: torch.device, transpose: bool) -> Arm:
    """Return the arm of one form on one chain of random contractions."""
    shape = (num_segments, num_heads, HEAD_DIM, HEAD_DIM)
    M = torch.randn(shape, device=device) * (0.5 / HEAD_DIM**0.5)
    B = torch.randn(shape, device=device)
    entry, exit_ = torch.empty_like(B), torch.empty_like(B[:1])
    offsets = torch.tensor([0, num_segments], device=device)
    values = {
        "M": M.data_ptr(),
        "B": B.data_ptr(),
        "initial": B.data_ptr(),
        "offsets": offsets.data_ptr(),
        "entry": entry.data_ptr(),
        "exit": exit_.data_ptr(),
        "num_chains": 1,
        "num_value_heads": num_heads,
        "first_head": 0,
        "num_block_heads": num_heads,
        "head_dim": HEAD_DIM,
        "transpose": int(transpose),
    }
    tensors = (M, B, entry, exit_, offsets)  # the arm keeps them alive

    def run(keep=tensors):
        launch(record, "bench", values, device)

    return Arm(f"{record.family} {record.variant}", record.name, run, bytes=3 * B.nbytes)


def choose_records(arch: Arch, forms: list[str] | None) -> list[Record]:
    """Return the walk's records that build for a target, best family first; those of some forms if forms are given."""
    records = [r for r in registry().records() if r.program == "transfer_walk" and arch.name in r.archs]
    found = [r for r in records if forms is None or r.variant in forms]
    return sorted(found, key=lambda record: arch.families.index(record.family))


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
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("the walk's speed is measured on a CUDA device; none was found")
    device = torch.device("cuda", torch.cuda.current_device())
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    records = choose_records(arch_of_device(device), arguments.forms)
    rows, lines = [], []
    for num_heads in arguments.heads:
        for num_segments in arguments.segments:
            for where in ("L2", "memory"):
                arms = [make_arm(record, num_segments, num_heads, device, arguments.transpose) for record in records]
                times = measure(arms, device, runs=arguments.runs, flush=where == "memory")
                case = f"{num_segments} segments, {num_heads} heads, {where}"
                for record, arm in zip(records, arms):
                    found = times[arm.name]
                    rows.append(Row(case, arm.name, arm.engine, found, arm.bytes))
                    per_segment = 1e3 * found.median / num_segments
                    floor = floor_us(record, num_heads, num_sms)
                    lines.append([case, arm.name, f"{per_segment:.2f}", f"{floor:.2f}", f"{floor / per_segment:.0%}"])
                del arms
    print_table(["case", "form", "us per segment", "floor us", "share"], lines)
    print_ratio(rows)
    if arguments.json:
        direction = "transposed" if arguments.transpose else "forward"
        write_report(
            arguments.json, f"transfer walk, {direction}, K = V = 128", "cake_kda_jit.bench walk", device, rows
        )
    if arguments.png:
        draw(rows, arguments.png)
    return 0


def print_ratio(rows: list[Row]) -> None:
    """Print how much longer the fastest tf32_hilo takes than the fastest bf16x3, per case."""
    for case in dict.fromkeys(row.case for row in rows):
        best = {
            form: min((row.ms.median for row in rows if row.case == case and is_form(row.arm)), default=None)
            for form, is_form in (
                ("tf32_hilo", lambda arm: arm.endswith(" tf32_hilo")),
                ("bf16x3", lambda arm: " bf16x3" in arm),
            )
        }
        if None not in best.values():
            print(f"{case}: tf32_hilo / bf16x3 = {best['tf32_hilo'] / best['bf16x3']:.2f}")


def draw(rows: list[Row], path: Path) -> None:
    """Draw microseconds per segment over the number of segments, one line per form and one panel per head count."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def parts(row: Row) -> tuple[int, int, str]:
        segments, heads, where = row.case.split(", ")
        return int(segments.split()[0]), int(heads.split()[0]), where

    head_counts = sorted({parts(row)[1] for row in rows})
    figure, axes = pyplot.subplots(1, len(head_counts), figsize=(5.5 * len(head_counts), 4), squeeze=False)
    for axis, num_heads in zip(axes[0], head_counts):
        for arm in dict.fromkeys(row.arm for row in rows):
            chosen = [row for row in rows if row.arm == arm and parts(row)[1:] == (num_heads, "memory")]
            axis.plot([parts(r)[0] for r in chosen], [1e3 * r.ms.median / parts(r)[0] for r in chosen], "o-", label=arm)
        axis.axhline(MEMORY_FLOOR_NS * num_heads * 1e-3, color="gray", linestyle=":", label="memory floor")
        axis.set(
            title=f"{num_heads} heads, summaries in memory", xlabel="segments", ylabel="us per segment", xscale="log"
        )
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
