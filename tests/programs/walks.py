"""Chains of affine summaries for the transfer walk's tests, on any device."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

# Relative Frobenius error that each form reaches, flat from 4 to 64 fragments, over M of norm 0.97: emulated with
# truncating accumulation. The tests allow twice as much, because the summaries here are others.
FORM_ERRORS = {
    "bf16x3_hw64": 3.1e-7,
    "bf16x3": 3.1e-7,
    "tf32_hilo": 8e-7,
    "tf32_hilo_three_mma": 8e-7,
    "tf32_hilo_plain_tf32": 3e-4,
}


@cache
def make_summaries(fragments: int, heads: int, head_dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """M `[F, HV, K, K]` and B `[F, HV, K, K]`, fp32, of fragments of 64 tokens with weak decay: |M| is about 0.97.

    The recurrence over all fragments and heads at once, on states [M B] that start from [identity 0]. Calls with equal
    arguments share their tensors: leave them as they are.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(fragments * heads, *shape, generator=generator)

    states = torch.eye(head_dim, 2 * head_dim).repeat(fragments * heads, 1, 1)
    for _ in range(64):
        k, beta = functional.normalize(normal(1, head_dim), dim=-1), torch.sigmoid(normal(1, 1))
        v = functional.pad(normal(1, head_dim), (head_dim, 0))
        states *= torch.exp(-1e-3 * torch.sigmoid(normal(head_dim, 1)))
        states.baddbmm_(k.mT, beta * (v - k @ states))
    M, B = states.view(fragments, heads, head_dim, 2 * head_dim).chunk(2, dim=-1)
    return M.contiguous(), B.contiguous()


def make_states(chains: int, heads: int, head_dim: int, seed: int = 1) -> Tensor:
    """States `[N, HV, K, K]`, fp32, standard normal."""
    return torch.randn(chains, heads, head_dim, head_dim, generator=torch.Generator().manual_seed(seed))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`; NaN where anything found is NaN."""
    return ((found.double() - expected).norm() / expected.norm()).item()
