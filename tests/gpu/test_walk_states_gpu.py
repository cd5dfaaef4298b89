"""The states that walks bring to spans and segments of a published pack, in fp32, before a program rounds them.

Every walk of a forward and backward on virtual ranks is walked once more by each form, from the same M, B and initial
states, and once in FP64. What o and gradients differ by is in test_packs_gpu.py: there bf16 roundings turn.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cake_kda_jit import Partition, transfer_walk
from cake_kda_jit.bench.virtual_ranks import FORMS, STEP_ERRORS, make_pack, run_on_ranks
from cake_kda_jit.cp import passes
from cake_kda_jit.ops.pipeline import Pipeline
from cake_kda_jit.ops.recorder import AT_ONCE
from cake_kda_jit.reference import transfer_walk_reference

from ..cp.ranks import LAYOUTS

pytestmark = pytest.mark.gpu

PACKS = json.loads((Path(__file__).resolve().parents[1] / "data" / "packs.json").read_text())["packs"]
RANKS = 8
DEVICE = "cuda"
SHIPPED = "bf16x3_hw64"
NO_STATE = 1e-300
"""In place of the norm of a state that is 0, of which a walk must find every bit."""


@dataclass(frozen=True)
class Walked:
    """What one walk was given."""

    M: Tensor
    B: Tensor
    initial: Tensor | None
    offsets: Tensor
    transpose: bool

    @property
    def most_steps(self) -> int:
        """The steps of its longest chain."""
        return int(self.offsets.diff().max())

    def states(self, form: str) -> Tensor:
        """What enters fragments and what leaves chains, by a form of the walk."""
        named = {"variant": FORMS[form].get("transfer_walk", "tf32_hilo"), **FORMS[form]}
        named.pop("transfer_walk", None)
        return torch.cat(transfer_walk(self.M, self.B, self.initial, self.offsets, transpose=self.transpose, **named))

    def exact_states(self) -> Tensor:
        """The same in FP64."""
        given = (self.M, self.B, self.initial, self.offsets.tolist(), self.transpose)
        return torch.cat(transfer_walk_reference(*given))


def walks_of_states(regime: str, layout: str, monkeypatch) -> list[Walked]:
    """The walks of all ranks, to spans and to their segments. Products of M alone, which start from B = 0, are none."""
    pack, found = make_pack(PACKS["Q1"], regime=regime, device=DEVICE), []
    to_spans, into, to_segments = passes.walk, passes.walk_into, Pipeline.walk

    def keep(M, B, initial, offsets, transpose):
        first, end = int(offsets[0]), int(offsets[-1])
        M, B, offsets = M[first:end].clone(), B[first:end].clone(), offsets - first
        if B.any():
            found.append(Walked(M, B, None if initial is None else initial.clone(), offsets, transpose))

    def walk_to_spans(M, B, initial, offsets, **options):
        keep(M, B, initial, offsets, options["transpose"])
        return to_spans(M, B, initial, offsets, **options)

    def walk_shares(executor, given, results, **options):
        keep(*given, options["transpose"])
        return into(executor, given, results, **options)

    def walk_to_segments(self, block, M, B, initial, *, transpose):
        keep(M, B, initial, self.inputs.summary_offsets, transpose)
        return to_segments(self, block, M, B, initial, transpose=transpose)

    monkeypatch.setattr(passes, "run_part", lambda ctx, key, tensors, function: function(AT_ONCE, tensors))
    monkeypatch.setattr(passes, "walk", walk_to_spans)
    monkeypatch.setattr(passes, "walk_into", walk_shares)
    monkeypatch.setattr(Pipeline, "walk", walk_to_segments)
    run_on_ranks(pack, getattr(Partition, layout)(pack.boundaries, RANKS))
    monkeypatch.undo()
    return found


def errors(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """The relative Frobenius error of all states together, and the largest of one alone."""
    difference, norms = ((x.double()).norm(dim=(-2, -1)) for x in (found - expected, expected))
    return (difference.norm() / norms.norm()).item(), (difference / norms.clamp_min(NO_STATE)).max().item()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("regime", ["crossing", "slow"])
def test_states_are_as_exact_as_each_walk_was_designed_for(regime, layout, monkeypatch):
    """From FP64, and from the shipped walk, by no more than the design has for the former.

    It is flat in the number of steps where states fade, as all but the slowest gates let them. There the errors of all
    steps stay, and add up to as many times the design as a chain has steps at most. A state alone may be a quarter
    worse than all together, as in the walk's own tests.
    """
    walks = walks_of_states(regime, layout, monkeypatch)
    assert {walk.transpose for walk in walks} == {False, True}
    largest: dict[tuple[str, str], float] = {}
    for walk in walks:
        exact, shipped = walk.exact_states(), walk.states(SHIPPED)
        for form, design in STEP_ERRORS.items():
            allowed = design * (1 if regime == "crossing" else walk.most_steps)
            states = walk.states(form)
            for other, expected in (("FP64", exact), (SHIPPED, shipped)):
                together, alone = errors(states, expected)
                largest[form, other] = max(alone, largest.get((form, other), 0.0))
                assert together <= allowed and alone <= 1.25 * allowed, (form, other, together, alone)
    assert largest["bf16x3", SHIPPED] == 0 < largest["tf32_hilo", SHIPPED]
    print(f"{regime}, {layout}: {len(walks)} walks of up to {max(walk.most_steps for walk in walks)} steps")
    print("; ".join(f"{form} from {other} {error:.1e}" for (form, other), error in largest.items()))
