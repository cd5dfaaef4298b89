"""Forwards of chunk_kda on the device, what they are compared with, and a neighbour that keeps processors busy."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from cake_kda_jit import chunk_kda, make_plan, transfer_walk
from cake_kda_jit.bench.problems import BUDGETS, LOCAL_FACTOR, NAMES, Problem, local_errors, relative_error
from cake_kda_jit.reference import chunk_kda_reference

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
    moved = problem.to("cuda")
    inputs = [moved.inputs[name].double() for name in NAMES]
    keywords = {n: v.double() if isinstance(v, Tensor) else v for n, v in moved.keywords.items()}
    o, final_state = chunk_kda_reference(*inputs, cu_seqlens=moved.cu_seqlens, **keywords)
    return {"o": o, "final_state": final_state}


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


@contextmanager
def half_of_the_processors_busy():
    """Give a function that starts walks on another stream: one CTA for every second processor, one CTA a processor."""
    chains = torch.cuda.get_device_properties(0).multi_processor_count // 2
    fragments = 32
    M, B = (torch.zeros(chains * fragments, 1, 128, 128, device="cuda") for _ in range(2))
    offsets = torch.arange(chains + 1, device="cuda") * fragments
    stream = torch.cuda.Stream()

    def occupy(times: int = 4) -> None:
        with torch.cuda.stream(stream):
            for _ in range(times):
                transfer_walk(M, B, None, offsets)

    stream.wait_stream(torch.cuda.current_stream())
    yield occupy
    stream.synchronize()
