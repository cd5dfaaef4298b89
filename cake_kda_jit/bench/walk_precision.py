"""The error table of the transfer walk: form, kind of summaries, number of segments; forward and transposed.

Run ``python -m cake_kda_jit.bench.walk_precision [--json FILE]``; it prints Markdown for docs/numerics.md. With
``--table FILE`` it prints that of a file that was written before.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from torch.nn.functional import normalize

from ..ops.api import segment_summary
from ..record import Record
from ..reference import transfer_walk_reference
from ..runtime.device import arch_of_device
from ..runtime.launch import launch
from .core import machine, print_table, write_report
from .problems import relative_error
from .walk import choose_records, walk_values

COUNTS = (1, 4, 16, 64, 256)
"""Segments after which the state is compared."""


@dataclass(frozen=True)
class Case:
    """Keys, gates and beta of the tokens that a kind of summaries is made from."""

    gates: tuple[float, float]
    common_key: float = 0.0
    beta: float | None = None


CASES = {
    "near identity": Case((-1e-3, 0.0)),
    "weak gates": Case((-0.034, -0.012)),
    "strong gates": Case((-0.3, -0.05)),
    "correlated keys": Case((-0.034, -0.012), common_key=0.949, beta=1.0),
}
"""near identity: decays so slow that M keeps what no key of the segment touches; M's 2-norm is 0.97 at K = 128."""


def make_summaries(case: Case, segments: int, *, heads: int, head_dim: int, seed: int = 0):
    """Return M and B ``[segments, heads, K, K]`` of random segments, from ``segment_summary``.

    A segment has K / 2 tokens, so that half of the directions of the state meet no key.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = segments * (head_dim // 2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, heads, *shape, generator=generator)

    k, v = normalize(normal(head_dim), dim=-1), normal(head_dim)
    if case.common_key:  # cosine common_key^2 between any two keys
        common = normalize(torch.randn(heads, head_dim, generator=generator), dim=-1)
        k = case.common_key * common + (1.0 - case.common_key**2) ** 0.5 * k
    g = torch.empty(v.shape).uniform_(*case.gates, generator=generator)
    beta = torch.sigmoid(normal()) if case.beta is None else torch.full(v.shape[:3], case.beta)
    offsets = torch.arange(segments + 1) * (head_dim // 2)
    return segment_summary(k, v, g, beta, offsets, use_qk_l2norm_in_kernel=True)


@dataclass(frozen=True)
class Row:
    """Errors of one form: ``norm`` is M's mean 2-norm, ``errors`` has forward and transposed by segments walked."""

    case: str
    form: str
    norm: float
    errors: dict[int, tuple[float, float]]


def walk_errors(record: Record, M: torch.Tensor, B: torch.Tensor, *, transpose: bool, device="cpu") -> dict[int, float]:
    """Return the relative Frobenius error of the state after each count of segments, against FP64 on the same M, B."""
    segments, heads, head_dim, _ = B.shape
    initial = torch.randn(1, heads, head_dim, head_dim, generator=torch.Generator().manual_seed(1))
    expected = _states(transfer_walk_reference(M, B, initial, [0, segments], transpose), transpose)
    given = {"M": M, "B": B, "initial": initial, "offsets": torch.tensor([0, segments])}
    given = {name: tensor.to(device).contiguous() for name, tensor in given.items()}
    given |= {"entry": torch.full_like(given["B"], torch.nan), "exit": torch.full_like(given["initial"], torch.nan)}
    launch(record, "bench", walk_values(given, transpose), given["B"].device)
    found = _states((given["entry"].cpu(), given["exit"].cpu()), transpose)
    return {count: relative_error(found[count], expected[count]) for count in COUNTS if count <= segments}


def _states(walked, transpose: bool) -> torch.Tensor:
    """The states after 0, 1, 2, ... segments, in the order of the walk."""
    entry, exit_ = walked
    return torch.cat([entry.flip(0) if transpose else entry, exit_])


def rows_of(case: str, records: Sequence[Record], *, heads: int, head_dim: int, device: torch.device) -> list[Row]:
    """Return a row per record for one kind of summaries."""
    M, B = make_summaries(CASES[case], max(COUNTS), heads=heads, head_dim=head_dim)
    norm = torch.linalg.matrix_norm(M[:8].double(), ord=2).mean().item()
    rows = []
    for record in records:
        forward, transposed = (walk_errors(record, M, B, transpose=way, device=device) for way in (False, True))
        errors = {count: (forward[count], transposed[count]) for count in COUNTS}
        rows.append(Row(case, f"{record.family} {record.variant}", norm, errors))
    return rows


def print_rows(what: str, machine: dict[str, str], date: str, rows: Sequence[Row]) -> None:
    """Print the table as Markdown: each cell is the error forward / transposed."""
    print(f"{what}; {machine['device']}, torch {machine['torch']}, {date}.\n")
    lines = []
    for row in rows:
        cells = [f"{forward:.1e} / {transposed:.1e}" for forward, transposed in row.errors.values()]
        lines.append([f"{row.case} ({row.norm:.2f})", f"`{row.form}`", *cells])
    print_table(["summaries (2-norm of M)", "form", *(f"after {count}" for count in rows[0].errors)], lines)


def print_file(path: Path) -> None:
    """Print the table of a file that ``--json`` wrote."""
    report = json.loads(path.read_text(encoding="utf-8"))
    rows = [Row(**{**row, "errors": dict(row["errors"])}) for row in report["rows"]]
    print_rows(report["what"], report["machine"], report["date"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every form that the device has and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--head-dim", type=int, default=128, choices=(64, 128))
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--table", type=Path, help="print the table of this file, and measure nothing")
    arguments = parser.parse_args(argv)
    if arguments.table:
        print_file(arguments.table)
        return 0
    device, head_dim, heads = torch.device(arguments.device), arguments.head_dim, arguments.heads
    arch = arch_of_device(device)
    what = f"K = V = {head_dim}, segments of {head_dim // 2} tokens, heads: {heads}; target {arch.name}"
    records = choose_records(arch, None)
    rows = [row for case in CASES for row in rows_of(case, records, heads=heads, head_dim=head_dim, device=device)]
    print_rows(what, machine(device), str(date.today()), rows)
    if arguments.json:
        write_report(arguments.json, what, "cake_kda_jit.bench.walk_precision", device, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
