"""Random problems for chunk_kda, their FP64 reference, and the budgets that results are held to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ..reference import (
    chunk_kda_reference,
    chunk_kda_reference_backward,
    parameter_norms_reference,
    recurrent_kda,
)

NAMES = ("q", "k", "v", "g", "beta")
REGIMES = ("bounded", "softplus", "weak", "correlated")

# Relative Frobenius error against FP64 on the same bf16 inputs: what rounding the chunk form's bf16 and TF32 operands
# once costs, as docs/numerics.md tabulates it. The cpu family computes in fp32 and rounds only its outputs.
BUDGETS = {
    "bounded": {
        "o": 3.6e-3,
        "final_state": 3.2e-3,
        "dq": 2.9e-3,
        "dk": 2.9e-3,
        "dv": 3.6e-3,
        "dg": 3.6e-3,
        "dbeta": 3.3e-3,
    },
    "softplus": {
        "o": 4.0e-3,
        "final_state": 3.5e-3,
        "dq": 3.8e-3,
        "dk": 3.8e-3,
        "dv": 3.8e-3,
        "dg": 4.2e-3,
        "dbeta": 3.9e-3,
    },
    "correlated": {"o": 8e-3, "final_state": 8e-3, "dq": 7e-3, "dk": 7e-3, "dv": 8e-3, "dg": 7e-3, "dbeta": 9e-3},
}
BUDGETS["weak"] = BUDGETS["softplus"]
LOCAL_FACTOR = 1.5
"""A document's or a head's own error may be this much above the budget: a global norm would hide a local fault."""
PARAMETER_BUDGET = 3e-4
"""dA_log and ddt_bias are cancelling sums: their error is relative to the sum of absolute values."""
ROUNDING = 1.66e-3
"""What one rounding to bf16 takes from numbers that are normally distributed, relative to their norm."""
PARAMETER_DEVIATIONS = 3.0
"""A single sum's error may be this many standard deviations of what tiles at their budgets make of it."""


@dataclass
class Problem:
    """Inputs, keyword arguments, and which tensors get gradients."""

    inputs: dict[str, torch.Tensor]
    keywords: dict[str, object] = field(default_factory=dict)
    cu_seqlens: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> Problem:
        """Return the problem with every tensor on a device."""

        def moved(value):
            return value.to(device) if isinstance(value, torch.Tensor) else value

        inputs = {name: moved(tensor) for name, tensor in self.inputs.items()}
        return Problem(inputs, {name: moved(value) for name, value in self.keywords.items()}, moved(self.cu_seqlens))

    def leaves(self) -> dict[str, torch.Tensor]:
        """Every tensor that can require a gradient."""
        optional = {
            name: self.keywords[name]
            for name in ("A_log", "dt_bias", "initial_state")
            if self.keywords.get(name) is not None
        }
        return {**self.inputs, **optional}


def make_problem(
    lengths,
    *,
    regime="bounded",
    heads=2,
    value_heads=None,
    head_dim=64,
    dtype=torch.bfloat16,
    seed=0,
    with_state=True,
    batch=None,
) -> Problem:
    """Return a random problem; ``batch`` gives a dense batch of equal lengths instead of a pack."""
    generator = torch.Generator().manual_seed(seed)
    value_heads = value_heads or heads
    tokens = batch[1] if batch else sum(lengths)
    rows, documents = (batch[0], batch[0]) if batch else (1, len(lengths))

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=generator, dtype=torch.float32) * scale

    q, k, v = (normal(rows, tokens, h, head_dim) for h in (heads, heads, value_heads))
    if regime == "correlated":
        # cosine 0.9 between keys: k = 0.949 common + 0.316 own
        common = normal(1, 1, heads, head_dim)
        k = 0.949 * common / common.norm(dim=-1, keepdim=True) + 0.316 * k / k.norm(dim=-1, keepdim=True)
    g = normal(rows, tokens, value_heads, head_dim, scale=1.5)
    beta = normal(rows, tokens, value_heads) + (4.0 if regime == "correlated" else 0.0)
    keywords: dict[str, object] = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "A_log": torch.empty(value_heads).uniform_(0.0, 2.0, generator=generator),
        "dt_bias": normal(value_heads * head_dim, scale=0.5),
    }
    if regime == "bounded":
        keywords["lower_bound"] = -5.0
    else:
        shift = {"softplus": -3.0, "weak": -8.0, "correlated": -6.0}[regime]
        keywords["dt_bias"] = keywords["dt_bias"] + shift
    if with_state:
        keywords["initial_state"] = normal(documents, value_heads, head_dim, head_dim, scale=0.5)
    inputs = {name: tensor.to(dtype) for name, tensor in zip(NAMES, (q, k, v, g, beta))}
    cu_seqlens = None if batch else torch.tensor([0, *lengths]).cumsum(0)
    return Problem(inputs, keywords, cu_seqlens)


def run(function, problem: Problem, dtype: torch.dtype | None = None, **extra) -> dict[str, torch.Tensor]:
    """Run forward and backward with fixed random output gradients; returns outputs and gradients by name."""
    leaves = {
        name: (tensor if dtype is None else tensor.to(dtype)).detach().clone().requires_grad_()
        for name, tensor in problem.leaves().items()
    }
    keywords = {**problem.keywords, **{n: t for n, t in leaves.items() if n not in NAMES}, **extra}
    o, final_state = function(*(leaves[name] for name in NAMES), cu_seqlens=problem.cu_seqlens, **keywords)
    do, dfinal_state = output_gradients(o, final_state, problem.inputs["q"].dtype)
    torch.autograd.backward([o, final_state], [do.to(o), dfinal_state.to(final_state)])
    found = {"o": o.detach(), "final_state": final_state.detach()}
    return found | {"d" + name: leaf.grad for name, leaf in leaves.items()}


def output_gradients(o: torch.Tensor, final_state: torch.Tensor, dtype: torch.dtype):
    """Return do in a dtype and dfinal_state in fp32: always the same random ones for these shapes, on the CPU."""
    generator = torch.Generator().manual_seed(99)
    do = torch.randn(o.shape, generator=generator, dtype=torch.float32).to(dtype)
    return do, torch.randn(final_state.shape, generator=generator, dtype=torch.float32)


def chunk_reference(problem: Problem, *, gradients: bool = True) -> dict[str, torch.Tensor]:
    """Return what ``reference`` does by the chunk form in FP64, on the problem's device: many times as fast."""
    inputs, keywords = _in_fp64(problem)
    o, final_state = chunk_kda_reference(*inputs, **keywords)
    found = {"o": o, "final_state": final_state}
    if gradients:
        do, dfinal_state = output_gradients(o, final_state, problem.inputs["q"].dtype)
        last = {"do": do.to(o), "dfinal_state": dfinal_state.to(o)}
        back = chunk_kda_reference_backward(*inputs, **last, **keywords)
        found |= {"d" + name: getattr(back, "d" + name) for name in problem.leaves()}
    return found


def _in_fp64(problem: Problem) -> tuple[list[torch.Tensor], dict[str, object]]:
    """The inputs in the order of NAMES, and every keyword."""
    keywords = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in problem.keywords.items()}
    return [problem.inputs[name].double() for name in NAMES], {**keywords, "cu_seqlens": problem.cu_seqlens}


def reference(problem: Problem) -> dict[str, torch.Tensor]:
    """Return the FP64 recurrence and its autograd gradients on the same inputs."""
    return run(recurrent_kda, problem, dtype=torch.float64)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error."""
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def parameter_deviations(problem: Problem, regime: str) -> dict[str, torch.Tensor]:
    """Return the standard deviation of dA_log `[HV]` and ddt_bias `[HV * K]` where tiles of bf16 are at their budgets.

    A tile's numbers may be off by the budget of a state and are rounded once. Such errors have random signs, and those
    of different chunks are independent; so they make of a sum over tokens that share of the norm of its terms.
    """
    inputs, keywords = _in_fp64(problem)
    v, k = problem.inputs["v"], problem.inputs["k"]
    documents = v.shape[0] if problem.cu_seqlens is None else len(problem.cu_seqlens) - 1
    final_state = v.new_empty(documents, v.shape[2], k.shape[3], v.shape[3])
    do, dfinal_state = (x.to(inputs[0]) for x in output_gradients(v, final_state, v.dtype))
    norms = parameter_norms_reference(*inputs, do=do, dfinal_state=dfinal_state, **keywords)
    error = math.hypot(BUDGETS[regime]["final_state"], ROUNDING)
    return {"dA_log": error * norms.dA_log, "ddt_bias": error * norms.ddt_bias.flatten()}


def random_sign_dbeta(expected: dict[str, torch.Tensor], problem: Problem) -> torch.Tensor:
    """Return what ``|dbeta|`` of each token would be if its terms had random signs: the norm of the V terms.

    With z = dv / beta and the error x = v - S^T k that a token corrects, the terms are z x and the slope of beta. The
    state behind the token answers its key with v - (1 - beta |k|^2) x, which a run with k in place of q gives.
    """
    inputs = {name: tensor.double() for name, tensor in problem.inputs.items()}
    keywords = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in problem.keywords.items()}
    k, v, beta, slope = inputs["k"], inputs["v"], inputs["beta"], 1.0
    norms = k.square().sum(-1)
    if keywords.get("use_qk_l2norm_in_kernel"):
        norms = norms / (norms + 1e-6)
    if keywords.get("use_beta_sigmoid_in_kernel"):
        most, sigmoid = 2.0 if keywords.get("allow_neg_eigval") else 1.0, beta.sigmoid()
        beta, slope = most * sigmoid, most * sigmoid * (1.0 - sigmoid)
    answers, _ = chunk_kda_reference(
        k, k, v, inputs["g"], inputs["beta"], cu_seqlens=problem.cu_seqlens, **keywords | {"scale": 1.0}
    )
    norms = norms.repeat_interleave(v.shape[2] // k.shape[2], dim=2)
    x = (v - answers) / (1.0 - beta * norms).unsqueeze(-1)
    return slope * (expected["dv"] / beta.unsqueeze(-1) * x).norm(dim=-1)


def local_errors(
    name: str, found: torch.Tensor, expected: torch.Tensor, problem: Problem, terms: torch.Tensor | None = None
):
    """Yield (document, head, error / scale) of every part that has elements.

    The scale is the largest of the part's norm, the pack's rms share and, if ``terms`` has one for each element of a
    sum, the norm of the part's terms: what the part's own norm would be if they did not cancel.
    """
    rms = expected.square().mean().sqrt()
    boundaries = problem.cu_seqlens.tolist() if problem.cu_seqlens is not None else None
    tensors = (found, expected) if terms is None else (found, expected, terms)
    for document in range(len(boundaries) - 1 if boundaries else found.shape[0]):
        if name in ("final_state", "dinitial_state"):
            parts = [tensor[document] for tensor in tensors]
        elif boundaries:
            parts = [tensor[0, boundaries[document] : boundaries[document + 1]].transpose(0, 1) for tensor in tensors]
        else:
            parts = [tensor[document].transpose(0, 1) for tensor in tensors]
        for head, (one, *others) in enumerate(zip(*parts)):
            if one.numel():
                scale = max(*(other.norm() for other in others), rms * one.numel() ** 0.5)
                yield document, head, ((one.double() - others[0]).norm() / scale.clamp_min(1e-300)).item()
