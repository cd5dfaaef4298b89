"""Forwards of chunk_kda on the device, and what they are compared with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cake_kda_jit import chunk_kda, make_plan
from cake_kda_jit.bench.problems import (
    BUDGETS,
    LOCAL_FACTOR,
    NAMES,
    Problem,
    chunk_reference,
    local_errors,
    relative_error,
)

from .twins import bits


def plan_of(problem: Problem, **options):
    """A plan on the device for a problem's pack and heads."""
    _, _, heads, head_dim = problem.inputs["q"].shape
    return make_plan(
        problem.cu_seqlens.cpu(),
        num_heads=heads,
        num_value_heads=problem.inputs["v"].shape[2],
        head_dim=head_dim,
        device="cuda",
        **options,
    )


def forward(problem: Problem, segment_tokens: int | None = None, **extra) -> dict[str, Tensor]:
    """o and final_state of a forward on the device, there."""
    moved = problem.to("cuda")
    if segment_tokens is not None:
        extra["plan"] = plan_of(problem, segment_tokens=segment_tokens)
    with torch.no_grad():
        o, final_state = chunk_kda(
            *(moved.inputs[name] for name in NAMES),
            output_final_state=True,
            **{"cu_seqlens": moved.cu_seqlens, **moved.keywords, **extra},
        )
    return {"o": o, "final_state": final_state}


def exact(problem: Problem) -> dict[str, Tensor]:
    """The chunk form in FP64 on the same inputs, on the device: it runs the products of a chunk at once."""
    return chunk_reference(problem.to("cuda"), gradients=False)


def assert_within_budget(found, expected, problem: Problem, regime: str) -> None:
    """Finite, within the regime's budget as a whole, and document by document and head by head."""
    problem = replace(problem, cu_seqlens=None if problem.cu_seqlens is None else problem.cu_seqlens.cpu())
    for name, tensor in found.items():
        budget = BUDGETS[regime][name]
        assert torch.isfinite(tensor).all(), name
        assert relative_error(tensor, expected[name]) <= budget, name
        for document, head, error in local_errors(name, tensor, expected[name], problem):
            assert error <= LOCAL_FACTOR * budget, (name, document, head)


def assert_same_bits(found, expected, *names: str) -> None:
    """Every element as an integer, so that NaN equals itself and 0 does not equal -0."""
    for name in names or expected:
        assert torch.equal(bits(found[name]), bits(expected[name])), name
