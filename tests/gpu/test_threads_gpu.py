"""chunk_kda in threads of the host that have not used the device before, as autograd's has not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cake_kda_jit import chunk_kda
from cake_kda_jit.bench import problems
from cake_kda_jit.bench.problems import make_problem

from .forwards import assert_same_bits

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
STEP = """
import torch
from cake_kda_jit import chunk_kda
from cake_kda_jit.bench import problems
problem = problems.make_problem((300, 65), head_dim=128).to("cuda")
found = problems.run(chunk_kda, problem, output_final_state=True)
assert all(torch.isfinite(tensor).all() for tensor in found.values())
"""


def test_a_new_thread_has_the_bits_of_the_first():
    problem = make_problem((300, 65), head_dim=128).to("cuda")
    expected = problems.run(chunk_kda, problem, output_final_state=True)
    found = {}
    thread = threading.Thread(target=lambda: found.update(problems.run(chunk_kda, problem, output_final_state=True)))
    thread.start()
    thread.join()
    assert found.keys() == expected.keys()
    assert_same_bits(found, expected)


@pytest.mark.parametrize("allocator", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_a_step_beside_other_allocators(allocator):
    """Memory of theirs comes without a call that gives autograd's thread a context."""
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": allocator}
    done = subprocess.run([sys.executable, "-c", STEP], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
