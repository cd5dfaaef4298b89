"""The error table of chunk_kda: outputs and every gradient against FP64, beside their budgets.

Run ``python -m cake_kda_jit.bench precision [--device cuda] [--dtype fp32] [--json FILE]``; on a CUDA device long
documents follow. It prints Markdown for docs/numerics.md, and with ``--table FILE`` that of a file that was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..ops.api import chunk_kda
from ..ops.checks import DTYPE_NAMES
from ..runtime.device import arch_of_device
from .core import table_text
from .problems import (
    BUDGETS,
    LOCAL_FACTOR,
    NAMES,
    PARAMETER_BUDGET,
    REGIMES,
    Problem,
    chunk_reference,
    local_errors,
    make_problem,
    random_sign_dbeta,
    relative_error,
    run,
    small_pack_factor,
)
from .tables import make_parser, print_again, publish, titled

PARAMETERS = ("dA_log", "ddt_bias")
COLUMNS = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state", *PARAMETERS)
LENGTHS = (65, 0, 1, 200, 63, 64, 3, 500)
LONGEST, LONG_BACKWARD = 262_144, 32_768
COPIES = 33
"""Of two heads: 262,144 tokens of 66 heads of 128 channels are more elements than 31 bits count."""


@dataclass(frozen=True)
class Case:
    """One document, or LENGTHS: ``copies`` of two heads with the same values, and gradients or not."""

    regime: str
    head_dim: int
    tokens: int | None = None
    heads: int = 2
    copies: int = 1
    gradients: bool = True

    @property
    def name(self) -> str:
        """``weak, 128`` of the packs, ``weak, 128, T 262144, HV 66`` of a long document."""
        long = f", T {self.tokens}, HV {self.heads * self.copies}" if self.tokens else ""
        return f"{self.regime}, {self.head_dim}{long}"


PACKS = tuple(Case(regime, head_dim) for regime in REGIMES for head_dim in (64, 128))
LONG = (
    *(Case(regime, 128, LONG_BACKWARD, 1) for regime in REGIMES),
    *(Case(regime, 128, LONGEST, 1, gradients=False) for regime in REGIMES),
    *(Case(regime, 128, LONGEST, 2, COPIES, gradients=False) for regime in ("bounded", "weak")),
)


@dataclass(frozen=True)
class Row:
    """The error of one output or gradient of a case.

    ``error`` is that of the whole tensor; ``worst`` that of the worst document and head, which has ``tokens`` tokens;
    ``budget`` what ``error`` may be, and LOCAL_FACTOR times as much ``worst``. Of a parameter all is relative to the
    sum of the terms' absolute values, and tokens is None.
    """

    case: str
    output: str
    error: float
    worst: float
    tokens: int | None
    budget: float


def parameter_errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], problem: Problem):
    """Return the largest |error| / sum of absolute terms of dA_log and of ddt_bias.

    The terms are those that cancel: ``dg g`` (or ``dx x'`` in the bounded form) and ``dx``.
    """
    dx = expected["dg"].double().flatten(0, 1)
    raw = problem.inputs["g"].double().flatten(0, 1) + problem.keywords["dt_bias"].double().view(-1, dx.shape[-1])
    if "lower_bound" in problem.keywords:
        terms = dx * raw
    else:  # dx = dg * d gate / d raw, so dg g = dx softplus(raw) / sigmoid(raw)
        terms = dx * torch.nn.functional.softplus(raw) / torch.sigmoid(raw)
    A_log = (found["dA_log"].double() - expected["dA_log"]).abs() / terms.abs().sum((0, 2))
    bias = (found["ddt_bias"].double() - expected["ddt_bias"]).abs().view(dx.shape[1:]) / dx.abs().sum(0)
    return A_log.max().item(), bias.max().item()


def budget_of(name: str, regime: str, problem: Problem) -> float:
    """Return what the error of an output or gradient may be."""
    if name in PARAMETERS:
        return PARAMETER_BUDGET * (small_pack_factor(problem) if name == "dA_log" else 1.0)
    return BUDGETS[regime][name.replace("dinitial", "final")]


def compute(case: Case, problem: Problem) -> dict[str, torch.Tensor]:
    """Return chunk_kda's outputs and gradients by name; raises RuntimeError where copies of a head differ in a bit."""
    if case.gradients:
        return run(chunk_kda, problem, output_final_state=True)
    many = {name: _repeated(tensor, 2, case.copies) for name, tensor in problem.inputs.items()}
    keywords = dict(problem.keywords)
    for name, dimension in (("A_log", 0), ("dt_bias", 0), ("initial_state", 1)):
        keywords[name] = _repeated(keywords[name], dimension, case.copies)
    with torch.no_grad():
        o, final_state = chunk_kda(
            *(many[name] for name in NAMES), cu_seqlens=problem.cu_seqlens, output_final_state=True, **keywords
        )
    o, final_state = o.unflatten(2, (case.copies, case.heads)), final_state.unflatten(1, (case.copies, case.heads))
    if not all((x == x.select(-4, -1).unsqueeze(-4)).all() for x in (o.transpose(1, 2), final_state)):
        raise RuntimeError(f"{case.name}: copies of a head differ, or hold NaN")
    return {"o": o[:, :, -1], "final_state": final_state[:, -1]}


def _repeated(tensor: torch.Tensor, dimension: int, times: int) -> torch.Tensor:
    """The tensor ``times`` times over, along one dimension."""
    return tensor.repeat(*(times if d == dimension else 1 for d in range(tensor.dim())))


def rows_of(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0) -> list[Row]:
    """Return a row per output and gradient of a case."""
    lengths = (case.tokens,) if case.tokens else LENGTHS
    options = {"regime": case.regime, "head_dim": case.head_dim, "heads": case.heads, "dtype": dtype, "seed": seed}
    problem = make_problem(lengths, **options).to(device)
    expected = chunk_reference(problem, gradients=case.gradients)
    found = compute(case, problem)
    rows = []
    for name in [name for name in COLUMNS if name in found and name not in PARAMETERS]:
        terms = random_sign_dbeta(expected, problem) if name == "dbeta" else None
        local = local_errors(name, found[name], expected[name], problem, terms)
        worst, tokens = max((error, lengths[document]) for document, _, error in local)
        error = relative_error(found[name], expected[name])
        rows.append(Row(case.name, name, error, worst, tokens, budget_of(name, case.regime, problem)))
    if case.gradients:
        for name, error in zip(PARAMETERS, parameter_errors(found, expected, problem)):
            rows.append(Row(case.name, name, error, error, None, budget_of(name, case.regime, problem)))
    return rows


def worst_of(rows: Sequence[list[Row]]) -> Iterator[Row]:
    """Yield, of the rows of several seeds, the largest error and the worst document of each output."""
    for same in zip(*rows):
        local = max(same, key=lambda row: row.worst)
        yield replace(local, error=max(row.error for row in same))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of a file as Markdown: a line per case, what is over its budget in bold."""
    names = [name for name in COLUMNS if any(row["output"] == name for row in rows)]
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        cells = {row["output"]: _cell(row) for row in rows if row["case"] == case}
        lines.append([case, *(cells.get(name, "-") for name in names)])
    return table_text(["regime, K = V", *names], lines)


def _cell(row: dict[str, Any]) -> str:
    error, worst, budget = row["error"], row["worst"], row["budget"]
    if row["tokens"] is None:
        text, is_over = f"{1e3 * error:.1e} / {1e3 * budget:.1f}", error > budget
    else:
        text = f"{_short(1e3 * error)} / {_short(1e3 * worst)} ({row['tokens']}) / {1e3 * budget:.1f}"
        is_over = error > budget or worst > LOCAL_FACTOR * budget
    return f"**{text}**" if is_over else text


def _short(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else f"{value:.1e}"


def text_of(report: dict[str, Any]) -> str:
    """Return a report as docs/numerics.md shows it."""
    return titled(report, table(report["rows"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table: error / worst document and head (its tokens) / budget, in units of 1e-3."""
    parser = make_parser(__name__, main.__doc__)
    parser.add_argument("--dtype", default="bf16", choices=DTYPE_NAMES.values())
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(argv)
    if options.table:
        return print_again(options.table, text_of)
    device, seeds, rows = options.device, range(options.seeds), []
    [dtype] = [dtype for dtype, name in DTYPE_NAMES.items() if name == options.dtype]
    long = LONG if device.type == "cuda" else ()
    for case in (*PACKS, *long):
        tried = seeds if case.tokens is None else seeds[:1]
        rows += worst_of([rows_of(case, device, dtype, seed) for seed in tried])
    what = (
        f"{options.dtype} inputs, documents of {', '.join(map(str, LENGTHS))} tokens, H = HV = 2, worst of seeds "
        f"0 to {options.seeds - 1}{', or one long document' * bool(long)}; target {arch_of_device(device).name}"
    )
    publish(options, what, __name__, rows, text_of)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
