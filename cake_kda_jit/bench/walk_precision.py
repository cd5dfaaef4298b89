"""The error table of the transfer walk: form, kind of summaries, number of segments; forward and transposed.

Run ``python -m cake_kda_jit.bench walk_precision [--json FILE]``; it prints Markdown for docs/numerics.md. With
``--table FILE`` it prints that of a file that was written before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import normalize

from ..record import Record
from ..reference import segment_summary_reference, transfer_walk_reference
from ..runtime.device import arch_of_device
from ..runtime.launch import launch
from .core import table_text
from .problems import relative_error
from .tables import make_parser, print_again, publish, titled
from .walk import choose_records, walk_values

COUNTS = (1, 4, 16, 64, 256)
"""Segments after which the state is compared."""

SIDE_BY_SIDE = 16
"""Segments that the recurrence takes at a time: their states fit a processor's cache."""


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


def make_summaries(case: Case, segments: int, *, heads: int, head_dim: int, seed: int = 0, device="cpu"):
    """Return M and B ``[segments, heads, K, K]`` of random segments, from the recurrence in FP64, in fp32 on the CPU.

    A segment has K / 2 tokens, so that half of the directions of the state meet no key.
    """
    generator = torch.Generator().manual_seed(seed)
    # Segments lie side by side as heads do: each starts from nothing, so the recurrence takes all in K / 2 steps.
    size = (1, head_dim // 2, segments * heads)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*size, *shape, generator=generator)

    k, v = normalize(normal(head_dim), dim=-1), normal(head_dim)
    if case.common_key:  # cosine common_key^2 between any two keys
        common = normalize(torch.randn(heads, head_dim, generator=generator), dim=-1).repeat(segments, 1)
        k = case.common_key * common + (1.0 - case.common_key**2) ** 0.5 * k
    g = torch.empty(v.shape).uniform_(*case.gates, generator=generator)
    beta = torch.sigmoid(normal()) if case.beta is None else torch.full(size, case.beta)
    tokens = (tensor.to(device, torch.float64).split(SIDE_BY_SIDE, dim=2) for tensor in (k, v, g, beta))
    parts = [segment_summary_reference(*part, [0, size[1]], use_qk_l2norm_in_kernel=True) for part in zip(*tokens)]
    M, B = (torch.cat([x.float().cpu() for x in part], dim=1) for part in zip(*parts))
    return tuple(x.view(segments, heads, head_dim, head_dim) for x in (M, B))


@dataclass(frozen=True)
class Row:
    """Errors of one form: ``norm`` is M's mean 2-norm, ``errors`` has forward and transposed by segments walked."""

    case: str
    form: str
    norm: float
    errors: dict[int, tuple[float, float]]


@dataclass(frozen=True)
class Walk:
    """One chain of summaries in one direction, and its states in FP64: before any segment, then after each."""

    M: torch.Tensor
    B: torch.Tensor
    initial: torch.Tensor
    transpose: bool
    expected: torch.Tensor


def make_walk(M: torch.Tensor, B: torch.Tensor, transpose: bool) -> Walk:
    """Return the walk over M and B from a random state, with its states in FP64."""
    initial = torch.randn(1, *B.shape[1:], generator=torch.Generator().manual_seed(1))
    walked = transfer_walk_reference(M, B, initial, [0, len(M)], transpose)
    return Walk(M, B, initial, transpose, _states(walked, transpose))


def walk_errors(record: Record, walk: Walk, device: torch.device | str = "cpu") -> dict[int, float]:
    """Return the relative Frobenius error of the state after each count of segments, against FP64 on the same M, B."""
    segments = len(walk.M)
    given = {"M": walk.M, "B": walk.B, "initial": walk.initial, "offsets": torch.tensor([0, segments])}
    given = {name: tensor.to(device).contiguous() for name, tensor in given.items()}
    given |= {"entry": torch.full_like(given["B"], torch.nan), "exit": torch.full_like(given["initial"], torch.nan)}
    launch(record, "bench", walk_values(given, walk.transpose), given["B"].device)
    found = _states((given["entry"].cpu(), given["exit"].cpu()), walk.transpose)
    return {count: relative_error(found[count], walk.expected[count]) for count in COUNTS if count <= segments}


def _states(walked, transpose: bool) -> torch.Tensor:
    """The states after 0, 1, 2, ... segments, in the order of the walk."""
    entry, exit_ = walked
    return torch.cat([entry.flip(0) if transpose else entry, exit_])


def rows_of(case: str, records: Sequence[Record], *, heads: int, head_dim: int, device: torch.device) -> list[Row]:
    """Return a row per record for one kind of summaries."""
    M, B = make_summaries(CASES[case], max(COUNTS), heads=heads, head_dim=head_dim, device=device)
    norm = torch.linalg.matrix_norm(M[:8].double(), ord=2).mean().item()
    walks = [make_walk(M, B, transpose) for transpose in (False, True)]
    rows = []
    for record in records:
        forward, transposed = (walk_errors(record, walk, device) for walk in walks)
        errors = {count: (forward[count], transposed[count]) for count in COUNTS}
        rows.append(Row(case, f"{record.family} {record.variant}", norm, errors))
    return rows


def text_of(report: dict[str, Any]) -> str:
    """Return a report as docs/numerics.md shows it: each cell is the error forward / transposed."""
    lines = []
    for row in report["rows"]:
        cells = [f"{forward:.1e} / {transposed:.1e}" for forward, transposed in dict(row["errors"]).values()]
        lines.append([f"{row['case']} ({row['norm']:.2f})", f"`{row['form']}`", *cells])
    counts = (f"after {count}" for count in dict(report["rows"][0]["errors"]))
    return titled(report, table_text(["summaries (2-norm of M)", "form", *counts], lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every form that the device has and print the table."""
    parser = make_parser(__name__, main.__doc__)
    parser.add_argument("--head-dim", type=int, default=128, choices=(64, 128))
    parser.add_argument("--heads", type=int, default=1)
    options = parser.parse_args(argv)
    if options.table:
        return print_again(options.table, text_of)
    device, head_dim, heads = options.device, options.head_dim, options.heads
    arch = arch_of_device(device)
    what = f"K = V = {head_dim}, segments of {head_dim // 2} tokens, heads: {heads}; target {arch.name}"
    records = choose_records(arch, None)
    rows = [row for case in CASES for row in rows_of(case, records, heads=heads, head_dim=head_dim, device=device)]
    publish(options, what, __name__, rows, text_of)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
