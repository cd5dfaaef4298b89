"""Gate, beta and l2norm: values against scalar formulas of the standard library, hand gradients against autograd."""

import math

import pytest
import torch

from cake_kda_jit.reference import beta, beta_backward, gate, gate_backward, l2norm, l2norm_backward

from .problems import assert_near

SHIFTED = [-690.0, -30.0, -18.0, -16.7, -12.0, -7.0, -2.0, -1e-3, 0.0, 0.3, 5.0, 19.0, 21.0, 40.0, 800.0]


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def one_channel(values, dtype=torch.float64):
    """`[tokens, HV = 1, K = 1]`."""
    return torch.tensor(values, dtype=dtype).reshape(-1, 1, 1)


@pytest.mark.parametrize("bias", [-7.0, 0.0])
@pytest.mark.parametrize("A_log", [-3.0, 0.0, 4.0])
def test_softplus_form_keeps_its_relative_accuracy(A_log, bias):
    g = gate(one_channel([x - bias for x in SHIFTED]), one_channel([A_log]).reshape(1), one_channel([bias]).reshape(1))
    for actual, x in zip(g.flatten().tolist(), SHIFTED):
        # Subtracting and adding the bias may round x itself; x - bias + bias is what the formula sees.
        assert actual == pytest.approx(-math.exp(A_log) * softplus(x - bias + bias), rel=1e-13, abs=0)


@pytest.mark.parametrize("x", [-7.0, -12.0, -18.0, -30.0])
def test_softplus_form_in_fp32_at_real_biases(x):
    g = gate(one_channel([0.0], torch.float32), torch.tensor([4.0]), torch.tensor([x]))
    assert float(g) == pytest.approx(-math.exp(4.0) * softplus(x), rel=1e-6, abs=0)


@pytest.mark.parametrize("A_log", [None, -1.0, 2.0])
def test_bounded_form(A_log):
    parameter = None if A_log is None else torch.tensor([A_log], dtype=torch.float64)
    g = gate(one_channel(SHIFTED), parameter, None, lower_bound=-5.0)
    amplitude = 1.0 if A_log is None else math.exp(A_log)
    for actual, x in zip(g.flatten().tolist(), SHIFTED):
        if amplitude * x > -700:
            assert actual == pytest.approx(-5.0 * sigmoid(amplitude * x), rel=1e-12, abs=0)
    assert g.min() >= -5.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_saturated_gate_has_finite_gradients(dtype, lower_bound):
    x = one_channel([-3.0, -1e-3, 0.0, 1e-3, 3.0, 20.0], dtype).requires_grad_()
    A_log = torch.tensor([100.0], dtype=dtype, requires_grad=True)
    dt_bias = torch.zeros(1, dtype=dtype, requires_grad=True)
    g = gate(x, A_log, dt_bias, lower_bound)
    decay = g.exp()
    assert torch.isfinite(decay).all()
    automatic = torch.autograd.grad(decay.sum(), (x, A_log, dt_bias))
    by_hand = gate_backward(x, A_log, dt_bias, lower_bound, decay.detach())
    for gradient in (*automatic, *by_hand):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("lower_bound", "with_amplitude", "with_bias"),
    [(None, True, True), (None, True, False), (-5.0, True, True), (-5.0, True, False), (-0.7, False, True)],
)
def test_gate_backward_is_autograd(lower_bound, with_amplitude, with_bias):
    torch.manual_seed(0)
    x = (4 * torch.randn(2, 5, 3, 4, dtype=torch.float64)).requires_grad_()
    A_log = torch.randn(3, dtype=torch.float64, requires_grad=True) if with_amplitude else None
    dt_bias = torch.randn(3, 4, dtype=torch.float64, requires_grad=True) if with_bias else None
    g = gate(x, A_log, dt_bias, lower_bound)
    dg = torch.randn_like(g)
    by_hand = gate_backward(x, A_log, dt_bias, lower_bound, dg)
    for leaf, gradient in zip((x, A_log, dt_bias), by_hand):
        if leaf is None:
            assert gradient is None
        else:
            assert_near(gradient, torch.autograd.grad(g, leaf, dg, retain_graph=True)[0])


def test_gate_takes_a_flat_or_a_shaped_bias():
    torch.manual_seed(0)
    x, bias = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    A_log = torch.randn(3, dtype=torch.float64)
    assert torch.equal(gate(x, A_log, bias), gate(x, A_log, bias.flatten()))
    assert gate_backward(x, A_log, bias.flatten(), None, x)[2].shape == (12,)


def test_gate_refuses_what_is_neither_form():
    x = torch.zeros(1, 1, 1)
    with pytest.raises(ValueError, match="A_log"):
        gate(x, None, None)
    for bound in (0.0, -5.5, 1.0, math.nan):
        with pytest.raises(ValueError, match="lower_bound"):
            gate(x, None, None, bound)


@pytest.mark.parametrize(("sigmoid_on", "negative"), [(False, False), (True, False), (True, True)])
def test_beta(sigmoid_on, negative):
    b = torch.tensor([-40.0, -1.0, 0.0, 2.0, 40.0], dtype=torch.float64, requires_grad=True)
    strength = beta(b, sigmoid=sigmoid_on, allow_neg_eigval=negative)
    factor = 2.0 if negative else 1.0
    expected = [factor * sigmoid(x) for x in b.tolist()] if sigmoid_on else b.tolist()
    assert strength.tolist() == pytest.approx(expected, rel=1e-14)
    dbeta = torch.linspace(-1, 2, 5, dtype=torch.float64)
    (automatic,) = torch.autograd.grad(strength, b, dbeta)
    assert_near(beta_backward(b.detach(), dbeta, sigmoid=sigmoid_on, allow_neg_eigval=negative), automatic)


def test_beta_refuses_a_doubling_without_sigmoid():
    with pytest.raises(ValueError, match="allow_neg_eigval"):
        beta(torch.zeros(1), sigmoid=False, allow_neg_eigval=True)


def test_l2norm():
    torch.manual_seed(0)
    x = torch.randn(5, 7, dtype=torch.float64)
    # The epsilon decides a zero row and shapes a tiny one.
    x[0], x[1] = 0.0, 1e-4 * x[1]
    x.requires_grad_()
    y = l2norm(x)
    assert_near(y, x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    dy = torch.randn_like(x)
    (automatic,) = torch.autograd.grad(y, x, dy)
    assert_near(l2norm_backward(x.detach(), dy), automatic)
