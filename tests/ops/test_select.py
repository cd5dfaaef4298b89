"""Selection: the one place that chooses, its reasons and its refusals. No torch needed."""

from __future__ import annotations

import numpy as np
import pytest

from cake_kda_jit.errors import UnsupportedProblemError
from cake_kda_jit.ops.problem import AttentionProblem
from cake_kda_jit.ops.select import Following, ScanSizes, select_attention, select_following, select_walk


def test_reason_and_record():
    chosen = select_attention("chunk_prepare", AttentionProblem("x86_64_v3", "bf16", 2, 4, 128), None)
    assert chosen.record.name == "cpu/chunk_prepare__bf16_k128"
    assert chosen.reason == "bf16, K = V = 128; cpu is the best family of x86_64_v3 that has it"


def test_what_no_record_solves_is_refused_with_what_there_is():
    with pytest.raises(UnsupportedProblemError, match="cpu/chunk_grad__bf16_k64"):
        select_attention("chunk_grad", AttentionProblem("sm_90a", "fp16", 2, 4, 64), None)


def test_a_forced_family_that_cannot_run_raises():
    with pytest.raises(UnsupportedProblemError, match="family 'sm90' cannot run on x86_64_v3; it has cpu"):
        select_attention("chunk_prepare", AttentionProblem("x86_64_v3", "bf16", 2, 4, 128), "sm90")


H200 = AttentionProblem("sm_90a", "bf16", 32, 32, 128)
K64 = AttentionProblem("sm_90a", "bf16", 32, 32, 64)
B200 = AttentionProblem("sm_100a", "bf16", 32, 32, 128)
HOST = AttentionProblem("x86_64_v3", "bf16", 32, 32, 128)


@pytest.mark.parametrize(
    ("problem", "family", "scan", "sizes", "expected"),
    [
        (H200, None, "chunk_scan", (1, 128, 32, 132), Following(64, 1128)),
        (H200, None, "chunk_scan, kept", (1, 128, 32, 132), Following(64, 0)),
        (H200, None, "chunk_scan", (1, 128, 33, 132), Following(66, 1344)),
        (H200, None, "chunk_scan", (1, 128, 16, 132), Following(32, 0)),
        (H200, None, "grad_scan", (1, 129, 33, 132), Following(66, 64, from_last=True)),
        (H200, None, "chunk_scan", (1, 128, 34, 132), None),  # CTAs for more than half of the processors
        (H200, None, "chunk_scan", (1, 128, 32, 114), None),
        (H200, None, "chunk_scan", (2, 128, 16, 132), None),  # the second segment would wait for the first one's tiles
        (H200, None, "chunk_scan", (1, 32, 32, 132), None),  # four tiles for each CTA of chunk_prepare: too few
        (H200, "smxx", "chunk_scan", (1, 128, 32, 132), None),
        (K64, None, "grad_scan", (1, 128, 32, 132), None),  # no chunk_prepare of sm90
        (B200, None, "chunk_scan", (1, 128, 32, 148), None),
        (HOST, None, "chunk_scan", (1, 128, 32, 132), None),
    ],
)
def test_scans_that_begin_beside_chunk_prepare(problem, family, scan, sizes, expected):
    assert select_following(problem, family, scan, ScanSizes(*sizes)) == expected


@pytest.mark.parametrize(
    "environment, variant, mode, expected, source",
    [
        (None, None, 0, "bf16x3_hw64", "default"),
        ("bf16x3", None, 0, "bf16x3", "environment"),
        ("bf16x3", "tf32_hilo", 0, "tf32_hilo", "argument"),
        (None, None, 1, "tf32_hilo_three_mma", "argument"),
        (None, "tf32_hilo", 2, "tf32_hilo_plain_tf32", "argument"),
        ("bf16x3", "default", 0, "bf16x3_hw64", "default"),
    ],
)
def test_walk_knob_order(monkeypatch, environment, variant, mode, expected, source):
    if environment:
        monkeypatch.setenv("CAKE_KDA_JIT_TRANSFER_WALK", environment)
    chosen = select_walk("x86_64_v3", variant, mode, num_walks=1, head_dim=128)
    assert chosen.record.variant == expected
    assert chosen.reason == f"{expected} by {source}"


@pytest.mark.parametrize("environment, variant", [("bf16x3", None), (None, "bf16x3_hw64")])
def test_precision_mode_beside_a_bf16_walk_is_refused_naming_both(monkeypatch, environment, variant):
    if environment:
        monkeypatch.setenv("CAKE_KDA_JIT_TRANSFER_WALK", environment)
    with pytest.raises(ValueError, match="precision_mode=1 belongs to tf32_hilo, not to 'bf16x3"):
        select_walk("x86_64_v3", variant, 1, num_walks=1, head_dim=128)


def test_unknown_walks_and_modes_are_refused():
    with pytest.raises(UnsupportedProblemError, match="use one of bf16x3_hw64, bf16x3, tf32_hilo"):
        select_walk("x86_64_v3", "bf16x9", 0, num_walks=1, head_dim=128)
    with pytest.raises(UnsupportedProblemError, match="use one of bf16x3_hw64, bf16x3, tf32_hilo"):
        select_walk("x86_64_v3", np.array(["bf16x3", "tf32_hilo"]), 0, num_walks=1, head_dim=128)
    for mode in (3, 1.0, True):
        with pytest.raises(UnsupportedProblemError, match=f"precision_mode={mode!r}; use 0, 1"):
            select_walk("x86_64_v3", None, mode, num_walks=1, head_dim=128)


@pytest.mark.parametrize(
    ("num_walks", "head_dim", "variant"),
    [
        (1, 128, "bf16x3_hw32"),
        (33, 128, "bf16x3_hw32"),
        (34, 128, "bf16x3_hw64"),
        (66, 128, "bf16x3_hw64"),
        (67, 128, "bf16x3"),
        (10_000, 128, "bf16x3"),
        (66, 64, "bf16x3_hw32"),
        (67, 64, "bf16x3_hw64"),
        (10_000, 64, "bf16x3_hw64"),
    ],
)
def test_the_default_walk_fills_the_processors_of_sm_90a(num_walks, head_dim, variant):
    """132 of them. Elsewhere, and where a walk is named, its width is the named one."""
    for name in (None, "default"):
        chosen = select_walk("sm_90a", name, 0, num_walks=num_walks, head_dim=head_dim)
        assert (chosen.record.family, chosen.record.variant) == ("sm90", variant)
    for mode, form in ((0, "tf32_hilo"), (1, "tf32_hilo_three_mma"), (2, "tf32_hilo_plain_tf32")):
        suffix = "" if variant == "bf16x3" else "_hw64"
        tf32 = select_walk("sm_90a", "tf32_hilo", mode, num_walks=num_walks, head_dim=head_dim).record
        assert (tf32.family, tf32.variant) == ("sm90", form + suffix) or num_walks > 132
    named = select_walk("sm_90a", "bf16x3_hw64", 0, num_walks=num_walks, head_dim=head_dim)
    assert (named.record.family, named.record.variant) == ("sm90", "bf16x3_hw64")
    other = select_walk("sm_100a", None, 0, num_walks=num_walks, head_dim=head_dim)
    assert (other.record.family, other.record.variant) == ("smxx", "bf16x3_hw64")
