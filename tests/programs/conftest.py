"""Fixtures of the programs' tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Run the FP64 references on one thread: they are thousands of small operations, at which more threads only wait.

    The programs get their own num_threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
