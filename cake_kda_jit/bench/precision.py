"""The error table of chunk_kda: outputs and every gradient against the FP64 recurrence, beside their budgets.

Run ``python -m cake_kda_jit.bench.precision [--device cuda] [--dtype fp32]``; it prints Markdown for docs/numerics.md.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence

import torch

from ..ops.api import chunk_kda
from ..ops.checks import DTYPE_NAMES
from ..runtime.device import arch_of_device
from .core import machine, print_table
from .problems import (
    BUDGETS,
    PARAMETER_BUDGET,
    REGIMES,
    Problem,
    local_errors,
    make_problem,
    reference,
    relative_error,
    run,
)

COLUMNS = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
LENGTHS = (65, 0, 1, 200, 63, 64, 3, 500)


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


def row_of(
    regime: str, head_dim: int, seed: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> dict[str, tuple[float, float]]:
    """Return (global error, worst error of a document and head) of every output and gradient, by name."""
    problem = make_problem(LENGTHS, regime=regime, head_dim=head_dim, seed=seed, dtype=dtype)
    expected = reference(problem)
    found = {name: tensor.cpu() for name, tensor in run(chunk_kda, problem.to(device), output_final_state=True).items()}
    row = {}
    for name in COLUMNS:
        local = max(error for _, _, error in local_errors(name, found[name], expected[name], problem))
        row[name] = (relative_error(found[name], expected[name]), local)
    A_log, bias = parameter_errors(found, expected, problem)
    return row | {"dA_log": (A_log, A_log), "ddt_bias": (bias, bias)}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table: each cell is the global error / the worst document and head / the budget, in units of 1e-3."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bf16", choices=DTYPE_NAMES.values())
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args(argv)
    device, where = torch.device(arguments.device), machine(torch.device(arguments.device))
    [dtype] = [dtype for dtype, name in DTYPE_NAMES.items() if name == arguments.dtype]
    print(
        f"{arguments.dtype} inputs, documents of {', '.join(map(str, LENGTHS))} tokens, H = HV = 2; worst of seeds 0 "
        f"to {arguments.seeds - 1}; {where['device']}, target {arch_of_device(device).name}, torch {where['torch']}, "
        f"{datetime.date.today()}.\n"
    )
    names = (*COLUMNS, "dA_log", "ddt_bias")
    lines = []
    for regime in REGIMES:
        for head_dim in (64, 128):
            rows = [row_of(regime, head_dim, seed, arguments.device, dtype) for seed in range(arguments.seeds)]
            lines.append(
                [f"{regime}, {head_dim}", *(_cell(name, regime, [row[name] for row in rows]) for name in names)]
            )
    print_table(["regime, K = V", *names], lines)
    return 0


def _cell(name: str, regime: str, errors: list[tuple[float, float]]) -> str:
    if name in ("dA_log", "ddt_bias"):
        return f"{1e3 * max(error for error, _ in errors):.1e} / {1e3 * PARAMETER_BUDGET:.1f}"
    budget = BUDGETS[regime]["final_state" if name == "dinitial_state" else name]
    worst = (max(one for one, _ in errors), max(local for _, local in errors))
    return f"{_short(1e3 * worst[0])} / {_short(1e3 * worst[1])} / {1e3 * budget:.1f}"


def _short(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else f"{value:.1e}"


if __name__ == "__main__":
    raise SystemExit(main())
