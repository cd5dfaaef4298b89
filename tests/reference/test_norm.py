"""The reference of the gated norm against torch's own norm."""

import pytest
import torch
from torch.nn import functional

from cake_kda_jit.reference import gated_rms_norm_reference

from .problems import assert_near


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(64,), (7, 64), (2, 7, 3, 128)])
def test_is_torch_s_norm_times_a_sigmoid(shape):
    x, gate, weight = randn(*shape), randn(*shape, seed=1), randn(shape[-1], seed=2)
    expected = functional.rms_norm(x, weight.shape, weight, 1e-3) * torch.sigmoid(gate)
    assert_near(gated_rms_norm_reference(x, gate, weight, 1e-3), expected, 1e-14)


def test_shapes_that_do_not_fit_are_refused():
    for gate, weight in ((randn(3, 8), randn(8)), (randn(2, 8), randn(4))):
        with pytest.raises(ValueError, match="expected a gate like x"):
            gated_rms_norm_reference(randn(2, 8), gate, weight, 1e-5)
