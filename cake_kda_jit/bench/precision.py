"""The error table of chunk_kda: outputs and every gradient against the FP64 recurrence, beside their budgets.

Run ``python -m cake_kda_jit.bench.precision [--device cuda]``; it prints Markdown for docs/numerics.md.
"""

from __future__ import annotations

import argparse
import datetime
import platform

import torch

from ..ops.api import chunk_kda
from ..runtime.device import arch_of_device
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


def row_of(regime: str, head_dim: int, seed: int, device: str = "cpu") -> dict[str, tuple[float, float]]:
    """Return (global error, worst error of a document and head) of every output and gradient, by name."""
    problem = make_problem(LENGTHS, regime=regime, head_dim=head_dim, seed=seed)
    expected = reference(problem)
    found = {name: tensor.cpu() for name, tensor in run(chunk_kda, problem.to(device), output_final_state=True).items()}
    row = {}
    for name in COLUMNS:
        local = max(error for _, _, error in local_errors(name, found[name], expected[name], problem))
        row[name] = (relative_error(found[name], expected[name]), local)
    A_log, bias = parameter_errors(found, expected, problem)
    return row | {"dA_log": (A_log, A_log), "ddt_bias": (bias, bias)}


def main() -> None:
    """Print the table: each cell is the global error / the worst document and head / the budget, in units of 1e-3."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    print(
        f"bf16 inputs, documents of {', '.join(map(str, LENGTHS))} tokens, H = HV = 2; worst of {arguments.seeds} "
        f"seeds; {name}, target {arch_of_device(device).name}, torch {torch.__version__}, {datetime.date.today()}.\n"
    )
    names = (*COLUMNS, "dA_log", "ddt_bias")
    print("| regime, K = V | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for regime in REGIMES:
        for head_dim in (64, 128):
            rows = [row_of(regime, head_dim, seed, arguments.device) for seed in range(arguments.seeds)]
            cells = [_cell(name, regime, [row[name] for row in rows]) for name in names]
            print(f"| {regime}, {head_dim} | " + " | ".join(cells) + " |")


def _cell(name: str, regime: str, errors: list[tuple[float, float]]) -> str:
    if name in ("dA_log", "ddt_bias"):
        return f"{1e3 * max(error for error, _ in errors):.4f} / {1e3 * PARAMETER_BUDGET:.1f}"
    budget = BUDGETS[regime]["final_state" if name == "dinitial_state" else name]
    worst = (max(one for one, _ in errors), max(local for _, local in errors))
    return f"{1e3 * worst[0]:.2f} / {1e3 * worst[1]:.2f} / {1e3 * budget:.1f}"


if __name__ == "__main__":
    main()
