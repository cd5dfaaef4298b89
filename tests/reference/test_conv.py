"""The reference convolution against torch's own, document by document, and its states."""

import pytest
import torch
from torch.nn import functional

from cake_kda_jit.reference import causal_conv1d_reference

from .problems import assert_near


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(("activation", "with_bias"), [("silu", True), (None, False)])
def test_documents_are_torch_convolutions(width, state, activation, with_bias):
    cu = [0, 0, 1, 3, 6, 10, 10, 23]
    x, weight, N = randn(1, 23, 5), randn(5, width, seed=1), len(cu) - 1
    bias = randn(5, seed=2) if with_bias else None
    initial_state = randn(N, 5, width - 1, seed=3) if state else None
    y, final_state = causal_conv1d_reference(
        x, weight, bias, activation=activation, initial_state=initial_state, cu_seqlens=cu
    )
    assert y.shape == x.shape and final_state.shape == (N, 5, width - 1)
    for n, (start, end) in enumerate(zip(cu, cu[1:])):
        before = initial_state[n] if state else torch.zeros(5, width - 1, dtype=torch.float64)
        history = torch.cat([before, x[0, start:end].T], dim=1)
        assert torch.equal(final_state[n], history[:, history.shape[1] - (width - 1) :])
        if end > start:
            expected = functional.conv1d(history.unsqueeze(0), weight.unsqueeze(1), bias, groups=5)[0].T
            expected = functional.silu(expected) if activation == "silu" else expected
            assert_near(y[0, start:end], expected, 1e-14)


def test_short_documents_keep_the_tail_of_their_initial_state():
    state = torch.arange(9, dtype=torch.float64).reshape(3, 1, 3)
    x = torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64).reshape(1, 3, 1)
    _, final_state = causal_conv1d_reference(
        x, torch.ones(1, 4, dtype=torch.float64), initial_state=state, cu_seqlens=[0, 0, 1, 3]
    )
    assert final_state[:, 0].tolist() == [[0, 1, 2], [4, 5, 10], [8, 20, 30]]


def test_a_batch_is_a_pack_and_a_cut_is_a_handed_over_state():
    x, weight = randn(2, 9, 3), randn(3, 4, seed=1)
    y, final_state = causal_conv1d_reference(x, weight)
    packed, packed_state = causal_conv1d_reference(x.reshape(1, 18, 3), weight, cu_seqlens=[0, 9, 18])
    assert torch.equal(packed.reshape(y.shape), y) and torch.equal(packed_state, final_state)
    for cut in range(10):
        first, state = causal_conv1d_reference(x[:, :cut], weight)
        second, last = causal_conv1d_reference(x[:, cut:], weight, initial_state=state)
        assert_near(torch.cat([first, second], dim=1), y, 1e-15)
        assert torch.equal(last, final_state)


def test_every_input_passes_gradcheck():
    cu = torch.tensor([0, 0, 1, 3, 6, 8])
    inputs = [randn(1, 8, 2), randn(2, 4, seed=1), randn(2, seed=2), randn(5, 2, 3, seed=3)]
    for x in inputs:
        x.requires_grad_()

    def call(x, weight, bias, state):
        return causal_conv1d_reference(x, weight, bias, initial_state=state, cu_seqlens=cu)

    assert torch.autograd.gradcheck(call, inputs)


def test_no_tokens_at_all():
    y, final_state = causal_conv1d_reference(randn(1, 0, 2), randn(2, 3), cu_seqlens=[0, 0])
    assert y.shape == (1, 0, 2) and torch.equal(final_state, torch.zeros(1, 2, 2, dtype=torch.float64))


def test_refusals():
    x, weight = randn(2, 4, 3), randn(3, 4)
    with pytest.raises(ValueError, match="weight"):
        causal_conv1d_reference(x, randn(3, 5))
    with pytest.raises(ValueError, match="activation"):
        causal_conv1d_reference(x, weight, activation="gelu")
    with pytest.raises(ValueError, match="batch size is 2"):
        causal_conv1d_reference(x, weight, cu_seqlens=[0, 4])
    with pytest.raises(ValueError, match="initial_state"):
        causal_conv1d_reference(x, weight, initial_state=randn(2, 3, 4))
