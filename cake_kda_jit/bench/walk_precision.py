"""The error table of the transfer walk: form, kind of summaries, number of segments; forward and transposed.

Run ``python -m cake_kda_jit.bench.walk_precision``; it prints Markdown for docs/numerics.md.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from ..ops.api import segment_summary, transfer_walk
from ..reference import transfer_walk_reference
from ..runtime.device import arch_of_device
from .core import machine, print_table
from .problems import relative_error

FORMS: dict[str, dict[str, object]] = {
    "bf16x3_hw64": {},
    "bf16x3": {"variant": "bf16x3"},
    "tf32_hilo": {"variant": "tf32_hilo"},
    "tf32_hilo_three_mma": {"variant": "tf32_hilo", "precision_mode": 1},
    "tf32_hilo_plain_tf32": {"variant": "tf32_hilo", "precision_mode": 2},
}
"""How ``transfer_walk`` is asked for each form."""

COUNTS = (1, 4, 16, 64, 256)
"""Segments after which the state is compared."""


@dataclass(frozen=True)
class Case:
    """Keys, gates and beta of the tokens that a kind of summaries is made from."""

    gates: tuple[float, float]
    common_key: float = 0.0
    beta: float | None = None


CASES = {
    "near identity": Case((-1e-3, 0.0)),
    "weak gates": Case((-0.034, -0.012)),
    "strong gates": Case((-0.3, -0.05)),
    "correlated keys": Case((-0.034, -0.012), common_key=0.949, beta=1.0),
}
"""near identity: decays so slow that M keeps what no key of the segment touches; M's 2-norm is 0.97 at K = 128."""


def make_summaries(case: Case, segments: int, *, heads: int, head_dim: int, seed: int = 0):
    """Return M and B ``[segments, heads, K, K]`` of random segments, from ``segment_summary``.

    A segment has K / 2 tokens, so that half of the directions of the state meet no key.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = segments * (head_dim // 2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, heads, *shape, generator=generator)

    k, v = normalize(normal(head_dim), dim=-1), normal(head_dim)
    if case.common_key:  # cosine common_key^2 between any two keys
        common = normalize(torch.randn(heads, head_dim, generator=generator), dim=-1)
        k = case.common_key * common + (1.0 - case.common_key**2) ** 0.5 * k
    g = torch.empty(v.shape).uniform_(*case.gates, generator=generator)
    beta = torch.sigmoid(normal()) if case.beta is None else torch.full(v.shape[:3], case.beta)
    offsets = torch.arange(segments + 1) * (head_dim // 2)
    return segment_summary(k, v, g, beta, offsets, use_qk_l2norm_in_kernel=True)


def walk_errors(
    form: str, M: torch.Tensor, B: torch.Tensor, *, transpose: bool, counts=COUNTS, device="cpu"
) -> dict[int, float]:
    """Return the relative Frobenius error of the state after each count of segments, against FP64 on the same M, B."""
    segments, heads, head_dim, _ = B.shape
    initial = torch.randn(1, heads, head_dim, head_dim, generator=torch.Generator().manual_seed(1))
    expected = _states(transfer_walk_reference(M, B, initial, [0, segments], transpose), transpose)
    given = [tensor.to(device) for tensor in (M, B, initial)]
    found = transfer_walk(*given, torch.tensor([0, segments]), transpose=transpose, **FORMS[form])
    found = _states([tensor.cpu() for tensor in found], transpose)
    return {count: relative_error(found[count], expected[count]) for count in counts if count <= segments}


def _states(walked, transpose: bool) -> torch.Tensor:
    """The states after 0, 1, 2, ... segments, in the order of the walk."""
    entry, exit_ = walked
    return torch.cat([entry.flip(0) if transpose else entry, exit_])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table: each cell is the error forward / transposed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--head-dim", type=int, default=128, choices=(64, 128))
    parser.add_argument("--heads", type=int, default=1)
    arguments = parser.parse_args(argv)
    device, head_dim = torch.device(arguments.device), arguments.head_dim
    found = machine(device)
    print(
        f"K = V = {head_dim}, segments of {head_dim // 2} tokens, heads: {arguments.heads}; {found['device']}, target "
        f"{arch_of_device(device).name}, torch {found['torch']}, {datetime.date.today()}.\n"
    )
    lines = []
    for case, how in CASES.items():
        M, B = make_summaries(how, max(COUNTS), heads=arguments.heads, head_dim=head_dim)
        norm = torch.linalg.matrix_norm(M[:8].double(), ord=2).mean().item()
        for form in FORMS:
            forward, transposed = (
                walk_errors(form, M, B, transpose=transpose, device=arguments.device) for transpose in (False, True)
            )
            cells = [f"{forward[count]:.1e} / {transposed[count]:.1e}" for count in COUNTS]
            lines.append([f"{case} ({norm:.2f})", f"`{form}`", *cells])
    print_table(["summaries (2-norm of M)", "form", *(f"after {count}" for count in COUNTS)], lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
