"""The checks that run on several CUDA devices, rehearsed over gloo with tensors on the CPU."""

from __future__ import annotations

import pytest

from .devices import CHECKS, World, start

WORLD = World(2, "cpu", "gloo", 500)


@pytest.fixture(scope="module")
def found():
    return start(WORLD)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_rehearsal(found, check):
    failed = found[check]
    assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())
