"""Random problems for chunk_kda, their FP64 reference, and the budgets that results are held to."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..reference import recurrent_kda

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
    generator = torch.Generator().manual_seed(99)
    do = torch.randn(o.shape, generator=generator, dtype=torch.float32).to(problem.inputs["q"].dtype)
    dfinal_state = torch.randn(final_state.shape, generator=generator, dtype=torch.float32)
    torch.autograd.backward([o, final_state], [do.to(o), dfinal_state.to(final_state)])
    found = {"o": o.detach(), "final_state": final_state.detach()}
    return found | {"d" + name: leaf.grad for name, leaf in leaves.items()}


def reference(problem: Problem) -> dict[str, torch.Tensor]:
    """Return the FP64 recurrence and its autograd gradients on the same inputs."""
    return run(recurrent_kda, problem, dtype=torch.float64)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error."""
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def local_errors(name: str, found: torch.Tensor, expected: torch.Tensor, problem: Problem):
    """Yield (document, head, error / scale); scale is the larger of the part's norm and the pack's rms share."""
    rms = expected.square().mean().sqrt()
    boundaries = problem.cu_seqlens.tolist() if problem.cu_seqlens is not None else None
    for document in range(len(boundaries) - 1 if boundaries else found.shape[0]):
        if name in ("final_state", "dinitial_state"):
            parts = (found[document], expected[document])
        elif boundaries:
            start, end = boundaries[document], boundaries[document + 1]
            parts = (found[0, start:end].transpose(0, 1), expected[0, start:end].transpose(0, 1))
        else:
            parts = (found[document].transpose(0, 1), expected[document].transpose(0, 1))
        for head in range(parts[0].shape[0]):
            one, other = parts[0][head].double(), parts[1][head]
            if other.numel():
                scale = max(other.norm(), rms * other.numel() ** 0.5)
                yield document, head, ((one - other).norm() / scale.clamp_min(1e-300)).item()
