"""Random FP64 problems for the reference tests, and how their gradients are taken and compared."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cake_kda_jit.reference import KdaGradients, recurrent_kda

GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state", "dA_log", "ddt_bias")


@dataclass
class Problem:
    """One call: `inputs` are q, k, v, g, beta; `keywords` go to any of the references; do, dfinal_state as results."""

    inputs: list[Tensor]
    keywords: dict
    do: Tensor
    dfinal_state: Tensor
    leaves: list[Tensor | None] = field(default_factory=list)

    def forward(self, function=recurrent_kda):
        return function(*self.inputs, **self.keywords)


def make_problem(cu_seqlens, *, H=2, HV=4, K=8, V=6, seed=0, state=True, **keywords) -> Problem:
    """Leaves that require grad, everything in FP64; parameters where `use_gate_in_kernel` asks for them."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    T, N = cu_seqlens[-1], len(cu_seqlens) - 1
    q, k, v, g, beta = randn(1, T, H, K), randn(1, T, H, K), randn(1, T, HV, V), randn(1, T, HV, K), randn(1, T, HV)
    parameters = [None, None]
    if keywords.get("use_gate_in_kernel"):
        parameters = [randn(HV), randn(HV * K) - 2]
    else:
        g = -g.abs()
    if not keywords.get("use_qk_l2norm_in_kernel"):
        # The delta rule is stable for keys of norm at most 1 only.
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    if not keywords.get("use_beta_sigmoid_in_kernel"):
        beta = beta.sigmoid()
    initial_state = randn(N, HV, K, V) if state else None
    if state and keywords.get("state_v_first"):
        initial_state = initial_state.mT.contiguous()
    leaves = [q, k, v, g, beta, initial_state, *parameters]
    for leaf in leaves:
        if leaf is not None:
            leaf.requires_grad_()
    keywords.update(cu_seqlens=cu_seqlens, initial_state=initial_state, A_log=leaves[6], dt_bias=leaves[7])
    final_shape = (N, HV, V, K) if keywords.get("state_v_first") else (N, HV, K, V)
    return Problem(leaves[:5], keywords, do=randn(1, T, HV, V), dfinal_state=randn(*final_shape), leaves=leaves)


def autograd_gradients(problem: Problem) -> dict[str, Tensor]:
    """Gradients of the recurrence for every leaf there is, by the names of `KdaGradients`."""
    o, final_state = problem.forward()
    names = [name for name, leaf in zip(GRADIENTS, problem.leaves) if leaf is not None]
    leaves = [leaf for leaf in problem.leaves if leaf is not None]
    gradients = torch.autograd.grad(
        (o, final_state), leaves, (problem.do, problem.dfinal_state), allow_unused=True, materialize_grads=True
    )
    return dict(zip(names, gradients))


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """Finite, and within `tolerance` of the larger of 1 and the expected tensor's largest value."""
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    if expected.numel():
        largest = max(1.0, float(expected.detach().abs().max()))
        assert float((actual - expected).detach().abs().max()) <= tolerance * largest


def assert_gradients_near(actual: KdaGradients, expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    """Every expected gradient is there and near; parameters without one are None."""
    for name in GRADIENTS:
        if name in expected:
            assert_near(getattr(actual, name), expected[name], tolerance)
    for name in ("dA_log", "ddt_bias"):
        assert (getattr(actual, name) is None) == (name not in expected)
