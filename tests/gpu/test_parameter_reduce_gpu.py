"""parameter_reduce on a CUDA device: the tree of its cpu twin, to the bit."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit.errors import UnsupportedProblemError

from ..programs.gradients import run_reduce
from ..programs.pipeline import poisoned
from ..programs.test_parameter_reduce import REFUSED, make_partials, make_values, tree_sum
from .twins import launch_on_device

pytestmark = pytest.mark.gpu


def run(partial_A_log, partial_dt_bias, **given):
    """dA_log [HV] and ddt_bias [HV, K] of one launch."""
    chunks, HV, K = partial_dt_bias.shape
    outputs = {"dA_log": poisoned(HV), "ddt_bias": poisoned(HV, K)}
    values = {"partial_A_log": partial_A_log, "partial_dt_bias": partial_dt_bias} | outputs
    values |= {"num_chunks": chunks, "num_value_heads": HV, "head_dim": K} | given
    launch_on_device("parameter_reduce", "fp32", values, outputs)
    return outputs


@pytest.mark.parametrize("chunks", [0, 1, 15, 16, 17, 63, 64, 65, 1024, 1025, 3000])
def test_the_tree_to_the_bit(chunks):
    partial_A_log, partial_dt_bias = make_partials(chunks)
    found = run(partial_A_log, partial_dt_bias)
    assert torch.equal(found["dA_log"], tree_sum(partial_A_log))
    assert torch.equal(found["ddt_bias"], tree_sum(partial_dt_bias))


@pytest.mark.parametrize("HV, K", [(1, 1), (5, 8), (3, 100), (33, 128), (96, 128)])
def test_any_width(HV, K):
    partials = make_partials(130, HV=HV, K=K)
    found, expected = run(*partials), run_reduce(*partials)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_same_bits_every_time():
    partials = make_partials(2000, HV=8, K=128)
    found = run(*partials)
    for _ in range(10):
        again = run(*partials)
        assert all(torch.equal(again[name], tensor) for name, tensor in found.items())


@pytest.mark.parametrize("absent", ["A_log", "dt_bias"])
def test_one_parameter_alone(absent):
    values = make_values(**{f"partial_{absent}": None, f"d{absent}": None})
    present = "dt_bias" if absent == "A_log" else "A_log"
    launch_on_device("parameter_reduce", "fp32", values, {f"d{present}": values[f"d{present}"]})
    assert torch.equal(values[f"d{present}"], tree_sum(values[f"partial_{present}"]))


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_refusals(changed, message):
    with pytest.raises(UnsupportedProblemError, match=message):
        launch_on_device("parameter_reduce", "fp32", make_values(**changed), {})
