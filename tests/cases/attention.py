"""Attention calls for the cases: any loss, forward and backward, outputs and gradients by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cake_kda_jit.runtime.load as load
from cake_kda_jit import chunk_kda, make_plan
from cake_kda_jit.bench.problems import (
    BUDGETS,
    LOCAL_FACTOR,
    NAMES,
    PARAMETER_BUDGET,
    Problem,
    local_errors,
    make_problem,
    relative_error,
)

Loss = Callable[[Tensor, Tensor], Tensor]


def ready_problem(lengths, *, gate, beta=None, dtype=torch.float32, seed=0, **shape) -> Problem:
    """A problem whose g and beta are used as they are: g uniform in the range ``gate``, beta uniform or constant."""
    problem = make_problem(lengths, dtype=dtype, seed=seed, **shape)
    generator = torch.Generator().manual_seed(seed + 1)
    g = torch.empty(problem.inputs["g"].shape).uniform_(*gate, generator=generator)
    strength = torch.empty(problem.inputs["beta"].shape)
    strength = strength.uniform_(0.0, 1.0, generator=generator) if beta is None else strength.fill_(beta)
    problem.inputs |= {"g": g, "beta": strength}
    state = problem.keywords.get("initial_state")
    problem.keywords = {"use_qk_l2norm_in_kernel": True} | ({} if state is None else {"initial_state": state})
    return problem


def slow_decay_problem(shifted: float, lower_bound: float | None, dtype: torch.dtype) -> tuple[Problem, Tensor, float]:
    """One token of beta 0 whose raw gate and bias add up to ``shifted``; with ``shifted`` in FP64, and exp(A_log)."""
    problem = make_problem((1,), heads=1, dtype=dtype, regime="softplus")
    problem.inputs["g"].fill_(-3.0)
    problem.inputs["beta"].fill_(0.0)
    A_log = 4.0 if lower_bound is None else 0.0
    problem.keywords = {
        "use_gate_in_kernel": True,
        "lower_bound": lower_bound,
        "A_log": torch.full((1,), A_log),
        "dt_bias": torch.full((64,), shifted + 3.0),
        "initial_state": problem.keywords["initial_state"],
    }
    return problem, torch.tensor(shifted, dtype=torch.float64), math.exp(A_log)


def assert_nothing_is_built(monkeypatch, step: Callable[[list[int], int, int], object]) -> None:
    """Warm up with one pack, ``step(lengths, segment_tokens, index)``, then take 20 others: no kernel is loaded."""
    step([70], 64, 0)
    warm = load.loaded_kernels()
    monkeypatch.setattr(load, "build", lambda *_: pytest.fail("a kernel was built"))
    generator = torch.Generator().manual_seed(0)
    for index in range(20):
        count = int(torch.randint(1, 7, (), generator=generator))
        lengths = torch.randint(0, 150, (count,), generator=generator).tolist()
        step(lengths, 64 * (index % 3), index)
    assert load.loaded_kernels() == warm


def part_of(problem: Problem, start: int, end: int) -> Problem:
    """Tokens [start, end) of a problem that is one document, with its parameters and its initial state."""
    inputs = {name: tensor[:, start:end] for name, tensor in problem.inputs.items()}
    return Problem(inputs, problem.keywords, torch.tensor([0, end - start]))


def call(problem: Problem, loss: Loss, segment_tokens: int | None = None, **extra) -> dict[str, Tensor]:
    """chunk_kda of leaves made from a problem's tensors, then ``loss(o, final_state).backward()``.

    Returns o, final_state and the gradient of every leaf, under the names of ``problems.run``.
    """
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in problem.leaves().items()}
    keywords = problem.keywords | {name: leaf for name, leaf in leaves.items() if name not in NAMES} | extra
    if segment_tokens is not None:
        _, _, heads, head_dim = problem.inputs["q"].shape
        plan = make_plan(
            problem.cu_seqlens,
            num_heads=heads,
            num_value_heads=problem.inputs["v"].shape[2],
            head_dim=head_dim,
            device="cpu",
            segment_tokens=segment_tokens,
        )
        keywords["plan"] = plan
    o, final_state = chunk_kda(
        *(leaves[name] for name in NAMES), cu_seqlens=problem.cu_seqlens, output_final_state=True, **keywords
    )
    loss(o, final_state).backward()
    return {"o": o.detach(), "final_state": final_state.detach()} | {"d" + n: leaf.grad for n, leaf in leaves.items()}


def weighted(seed: int = 7) -> Loss:
    """A loss that weighs every element of o and of the final state with fixed random numbers."""

    def loss(o: Tensor, final_state: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(tensor.shape, generator=generator) for tensor in (o, final_state)]
        return (o.float() * weights[0]).sum() + (final_state * weights[1]).sum()

    return loss


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor], *only: str) -> None:
    for name in only or expected:
        assert torch.equal(found[name], expected[name]), name


def assert_within_budgets(found, expected, problem: Problem, regime: str) -> None:
    """Every output and gradient is finite and within its budget, and so is each document's and head's own part."""
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), name
        if name in ("dA_log", "ddt_bias"):
            continue
        budget = BUDGETS[regime]["final_state" if name == "dinitial_state" else name]
        assert relative_error(tensor, expected[name]) <= budget, name
        for document, head, error in local_errors(name, tensor, expected[name], problem):
            assert error <= LOCAL_FACTOR * budget, (name, document, head)


def assert_near_fp64(found, expected, tolerance=2e-5, parameters=PARAMETER_BUDGET) -> None:
    """fp32 inputs show the arithmetic alone: products of up to 64 decays of 1e-7 each, and sums of 64 terms."""
    for name, tensor in found.items():
        limit = parameters if name in ("dA_log", "ddt_bias") else tolerance
        assert torch.isfinite(tensor).all(), name
        assert relative_error(tensor, expected[name]) <= limit, name
