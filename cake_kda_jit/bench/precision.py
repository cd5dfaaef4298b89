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
    PARAMETER_DEVIATIONS,
    REGIMES,
    Problem,
    chunk_reference,
    local_errors,
    make_problem,
    parameter_deviations,
    random_sign_dbeta,
    relative_error,
    run,
)
from .tables import make_parser, print_again, publish, titled

PARAMETERS = ("dA_log", "ddt_bias")
COLUMNS = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state", *PARAMETERS)
LENGTHS = (65, 0, 1, 200, 63, 64, 3, 500)
PEER_LENGTHS = (65, 200, 63, 500, 220)
"""As many tokens and documents as other libraries' errors were measured with."""
LONGEST, LONG_BACKWARD = 262_144, 32_768
COPIES = 33
"""Of two heads: 262,144 tokens of 66 heads of 128 channels are more elements than 31 bits count."""


@dataclass(frozen=True)
class Case:
    """Documents, or one of some tokens: ``copies`` of two heads with the same values, and gradients or not."""

    regime: str
    head_dim: int
    tokens: int | None = None
    heads: int = 2
    copies: int = 1
    gradients: bool = True
    documents: tuple[int, ...] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """The documents' tokens, those of LENGTHS if the case does not say."""
        return (self.tokens,) if self.tokens else self.documents or LENGTHS

    @property
    def name(self) -> str:
        """``weak, 128`` of the packs, with more behind it of others, as ``weak, 128, T 262144, HV 66``."""
        more = f", T {self.tokens}, HV {self.heads * self.copies}" if self.tokens else ""
        if self.documents:
            more = f", T {sum(self.documents)} in {len(self.documents)}"
        return f"{self.regime}, {self.head_dim}{more}"


PACKS = (
    *(Case(regime, head_dim) for regime in REGIMES for head_dim in (64, 128)),
    *(Case(regime, 128, documents=PEER_LENGTHS) for regime in REGIMES),
)
LONG = (
    *(Case(regime, 128, LONG_BACKWARD, 1) for regime in REGIMES),
    *(Case(regime, 128, LONGEST, 1, gradients=False) for regime in REGIMES),
    *(Case(regime, 128, LONGEST, 2, COPIES, gradients=False) for regime in ("bounded", "weak")),
)


@dataclass(frozen=True)
class Row:
    """The error of one output or gradient of a case.

    ``error`` is that of the whole tensor; ``worst`` that of the worst document and head, which has ``tokens`` tokens;
    ``budget`` what ``error`` may be, and LOCAL_FACTOR times as much ``worst``.

    Of a parameter's gradient ``error`` is that of the worst sum and ``worst`` that of the worst head in norm, both
    relative to the terms' absolute values, ``share`` the largest part of its bound that a sum takes, ``relative`` the
    relative Frobenius error, and tokens is None.
    """

    case: str
    output: str
    error: float
    worst: float
    tokens: int | None
    budget: float
    share: float | None = None
    relative: float | None = None


def parameter_terms(expected: dict[str, torch.Tensor], problem: Problem) -> dict[str, torch.Tensor]:
    """Return the sums of absolute terms of dA_log `[HV]` and of ddt_bias `[HV * K]`.

    The terms are those that cancel: ``dg g`` (or ``dx x'`` in the bounded form) and ``dx``.
    """
    dx = expected["dg"].double().flatten(0, 1)
    raw = problem.inputs["g"].double().flatten(0, 1) + problem.keywords["dt_bias"].double().view(-1, dx.shape[-1])
    if "lower_bound" in problem.keywords:
        terms = dx * raw
    else:  # dx = dg * d gate / d raw, so dg g = dx softplus(raw) / sigmoid(raw)
        terms = dx * torch.nn.functional.softplus(raw) / torch.sigmoid(raw)
    return {"dA_log": terms.abs().sum((0, 2)), "ddt_bias": dx.abs().sum(0).flatten()}


def parameter_errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], problem: Problem):
    """Return the largest |error| / sum of absolute terms of dA_log and of ddt_bias."""
    sums = parameter_terms(expected, problem)
    return tuple(((found[name].double() - expected[name]).abs() / sums[name]).max().item() for name in PARAMETERS)


WHOLE = "ddt_bias, whole"


def parameter_shares(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], problem: Problem, regime: str
) -> dict[str, float]:
    """Return the largest part that |error| of a sum takes of what it may be with tiles of bf16, by name.

    That is PARAMETER_BUDGET of the absolute terms and PARAMETER_DEVIATIONS standard deviations for dA_log and ddt_bias.
    For WHOLE, the norm over all of ddt_bias, it is one: errors of many channels have the norm of their deviations.
    """
    sums, deviations = parameter_terms(expected, problem), parameter_deviations(problem, regime)
    shares = {}
    for name in PARAMETERS:
        error, deviation = (found[name].double() - expected[name]).abs(), deviations[name]
        shares[name] = (error / (PARAMETER_BUDGET * sums[name] + PARAMETER_DEVIATIONS * deviation)).max().item()
    shares[WHOLE] = (error.norm() / (PARAMETER_BUDGET * sums[name] + deviation).norm()).item()
    return shares


def budget_of(name: str, regime: str) -> float:
    """Return what the error of an output or gradient may be."""
    return PARAMETER_BUDGET if name in PARAMETERS else BUDGETS[regime][name.replace("dinitial", "final")]


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
    lengths = case.lengths
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
        rows.append(Row(case.name, name, error, worst, tokens, budget_of(name, case.regime)))
    if case.gradients:
        rows += _parameter_rows(case, found, expected, problem)
    return rows


def _parameter_rows(case: Case, found, expected, problem: Problem) -> Iterator[Row]:
    sums, shares = parameter_terms(expected, problem), parameter_shares(found, expected, problem, case.regime)
    for name in PARAMETERS:
        error, heads = found[name].double() - expected[name], (-1, found["dA_log"].numel())
        largest = (error.abs() / sums[name]).max().item()
        by_head = (error.view(heads[::-1]).norm(dim=1) / sums[name].view(heads[::-1]).norm(dim=1)).max().item()
        relative = relative_error(found[name], expected[name])
        yield Row(case.name, name, largest, by_head, None, budget_of(name, case.regime), shares[name], relative)


def worst_of(rows: Sequence[list[Row]]) -> Iterator[Row]:
    """Yield, of the rows of several seeds, the largest error and the worst document of each output."""
    for same in zip(*rows):
        local = max(same, key=lambda row: row.worst)
        names = ("error",) if local.share is None else ("error", "share", "relative")
        yield replace(local, **{name: max(getattr(row, name) for row in same) for name in names})


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of a file as Markdown: a line per case, what is over its budget in bold."""
    names = [name for name in COLUMNS if name not in PARAMETERS and any(row["output"] == name for row in rows)]
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        cells = {row["output"]: _cell(row) for row in rows if row["case"] == case}
        lines.append([case, *(cells.get(name, "-") for name in names)])
    return table_text(["regime, K = V", *names], lines)


def table_of_sums(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of dA_log and ddt_bias as Markdown: a line per case, what is over its bound in bold."""
    names = ["dA_log: worst head", "relative", "of its bound"]
    names += ["ddt_bias: worst channel", "worst head, in norm", "relative", "of its bound"]
    lines = {row["case"]: [row["case"]] for row in rows if row["output"] in PARAMETERS}
    for name in PARAMETERS:
        measures = ("error", "relative") if name == "dA_log" else ("error", "worst", "relative")
        for row in (row for row in rows if row["output"] == name):
            share = f"{row['share']:.2f}"
            lines[row["case"]] += [_short(1e3 * row[measure]) for measure in measures]
            lines[row["case"]].append(share if row["share"] <= 1 else f"**{share}**")
    return table_text(["regime, K = V", *names], list(lines.values()))


def _cell(row: dict[str, Any]) -> str:
    error, worst, budget = row["error"], row["worst"], row["budget"]
    text = f"{_short(1e3 * error)} / {_short(1e3 * worst)} ({row['tokens']}) / {1e3 * budget:.1f}"
    is_over = error > budget or worst > LOCAL_FACTOR * budget
    return f"**{text}**" if is_over else text


def _short(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else f"{value:.1e}"


def text_of(report: dict[str, Any]) -> str:
    """Return a report as docs/numerics.md shows it."""
    rows = report["rows"]
    return titled(report, f"{table(rows)}\n{table_of_sums(rows)}")


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
        f"{options.dtype} inputs, documents of {', '.join(map(str, LENGTHS))} tokens or, where a row says 5, of "
        f"{', '.join(map(str, PEER_LENGTHS))}, H = HV = 2, worst of seeds 0 to {options.seeds - 1}"
        f"{', or one long document' * bool(long)}; target {arch_of_device(device).name}"
    )
    publish(options, what, __name__, rows, text_of)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
