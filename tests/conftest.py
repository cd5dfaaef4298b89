"""Shared fixtures: one cache for the whole run, poisoned memory, and the visible skip of tests that need a GPU."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

os.environ.setdefault("CAKE_KDA_JIT_CACHE_DIR", str(Path(__file__).parent / ".cache"))
# Threads that spin while they wait make a machine that runs anything else several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_modifyitems(items):
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def graphs_collected():
    """Torch leaves graphed callables to the garbage collector; a graph that ends within another capture breaks that."""
    yield
    gc.collect()


@pytest.fixture
def nan_poison():
    """Fill memory that torch hands out uninitialised with NaN, so that an element never written is seen."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
