"""The gated norm as an operation: its prepared calls, its operators, a compiler, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cake_kda_jit import UnsupportedProblemError, last_launches
from cake_kda_jit.layers import GatedRMSNorm
from cake_kda_jit.ops import calls
from cake_kda_jit.ops.gated import gated_rms_norm

from ..programs.convolutions import DTYPES
from ..programs.norms import EPS, NormCase, assert_near, make_case, reference
from .test_calls import Operators, assert_equal


@pytest.fixture(autouse=True)
def no_calls():
    """Each test begins with nothing prepared."""
    calls._calls.clear()


def run(case: NormCase, call=gated_rms_norm) -> list[torch.Tensor]:
    """y and every gradient."""
    leaves = [tensor.clone(memory_format=torch.preserve_format) for tensor in (case.x, case.gate, case.weight)]
    y = call(*[leaf.requires_grad_() for leaf in leaves], case.eps)
    return [y.detach(), *torch.autograd.grad(y, leaves, case.dy.reshape(y.shape))]


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_near_fp64(weight_dtype, nan_poison):
    case = make_case(head_dim=128, dtype=torch.bfloat16, weight_dtype=weight_dtype)
    assert_near(dict(zip(("y", "dx", "dgate", "dweight"), run(case))), reference(case), case)
    assert [launched.program for launched in last_launches()] == ["gated_norm_backward"]


@pytest.mark.parametrize("layout", ["as x", "flat", "batch", "batch, flat", "batch of copied rows"])
def test_prepared_calls_have_the_operators_bits(layout, nan_poison):
    """Whatever the shape, the same rows have the same bits; only what must be copied stays with the operators."""
    case = make_case(40, 3)
    expected = [one.flatten() for one in run(case)]
    x, gate = case.x, case.gate
    if layout.startswith("batch"):
        x, gate = x.view(2, 20, 3, 64), gate.view(2, 20, 3, 64)
    if layout.endswith("flat"):
        gate = gate.flatten(-2)
    if layout.endswith("copied rows"):
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    given = replace(case, x=x, gate=gate)
    calls._calls.clear()
    with Operators() as seen:
        found = run(given)
    assert seen.names == ["gated_rms_norm_forward", "gated_rms_norm_backward"] and not calls._calls
    assert (found[0].shape, found[1].shape, found[2].shape) == (gate.shape, x.shape, gate.shape)
    assert_equal([one.flatten() for one in found], expected)
    for _ in range(2):
        assert_equal(run(given), found)
    assert len(calls._calls) == (not layout.endswith("copied rows"))


def test_a_gradient_without_memory_of_its_own():
    """What a sum gives: one number for all."""
    case = make_case(10, 2)
    found = run(replace(case, dy=torch.ones(()).expand(case.dy.shape)))
    assert_equal(found, run(replace(case, dy=torch.ones(case.dy.shape))))


def test_without_rows():
    found = run(make_case(0))
    assert [tuple(one.shape) for one in found] == [(0, 3, 64)] * 3 + [(64,)] and not found[3].any()


def test_a_compiled_call_has_the_same_bits():
    case = make_case(10, 2, dtype=torch.bfloat16)
    compiled = torch.compile(gated_rms_norm, fullgraph=True, backend="aot_eager", dynamic=True)
    assert_equal(run(case, compiled), run(case))


def test_activation_checkpointing():
    case = make_case(10, 2)
    assert_equal(run(case, lambda *given: checkpoint(gated_rms_norm, *given, use_reentrant=False)), run(case))


def test_second_derivatives_are_refused():
    case = make_case(2, 1)
    x = case.x.requires_grad_()
    for surroundings in (Operators(), torch.enable_grad()):
        with surroundings:
            [dx] = torch.autograd.grad(gated_rms_norm(x, case.gate, case.weight, EPS).sum(), x, create_graph=True)
            with pytest.raises(UnsupportedProblemError, match="gated_rms_norm_backward has no gradient"):
                dx.sum().backward()


def test_a_forced_family_that_cannot_run_raises(monkeypatch):
    case = make_case(2, 1)
    run(case)
    monkeypatch.setenv("CAKE_KDA_JIT_FAMILY", "smxx")
    with pytest.raises(UnsupportedProblemError, match="family 'smxx' cannot run"):
        run(case)


def test_transforms_are_refused():
    case = make_case(2, 1)
    with pytest.raises(UnsupportedProblemError, match="inside a transform of torch.func"):
        torch.func.grad(lambda x: gated_rms_norm(x, case.gate, case.weight, EPS).sum())(case.x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": None}, "x is None"),
        ({"x": torch.randn(37, 64)}, r"x has shape \[37, 64\]; expected \[T, HV, D\]"),
        ({"x": torch.randn(37, 3, 96)}, r"D one of \(64, 128\)"),
        ({"x": torch.randn(37, 0, 64)}, r"x has shape \[37, 0, 64\]"),
        ({"gate": torch.randn(37, 3, 1)}, r"gate has shape \[37, 3, 1\]; expected \[37, 3, 64\] or \[37, 192\]"),
        ({"weight": torch.randn(1, 64)}, r"weight has shape \[1, 64\]; expected \[D\] = \[64\]"),
        ({"x": torch.randn(37, 3, 64).double()}, "x is torch.float64"),
        ({"gate": torch.randn(37, 3, 64).half()}, "x and gate share one dtype"),
        ({"weight": torch.ones(64, dtype=torch.int32)}, "weight is torch.int32"),
        ({"weight": torch.ones(64, device="meta")}, "weight is on meta"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"eps": None}, "eps=None"),
        ({"eps": 1e39}, r"eps=1e\+39; give a finite number of float32"),
    ],
)
def test_refuses(changes, message):
    case = make_case()
    given = {"x": case.x, "gate": case.gate, "weight": case.weight, "eps": EPS} | changes
    with pytest.raises(UnsupportedProblemError, match=message):
        gated_rms_norm(**given)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_module_takes_any_dtype_of_x_and_weight(dtype):
    """The result has the gate's dtype: what a projection gives, under autocast too."""
    case, norm = make_case(9, 2, dtype=dtype), GatedRMSNorm(64)
    nn.init.normal_(norm.weight)
    expected = norm(case.x.float(), case.gate.float())
    y = norm(case.x.float(), case.gate.flatten(-2))
    assert (y.dtype, y.shape) == (dtype, (9, 128))
    error = (y.view(expected.shape).float() - expected).abs()
    assert (error <= 2.0**-7 * expected.abs() + 1e-6).all()  # x and y are rounded once each, to 2^-8
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(norm(case.x.float(), case.gate.flatten(-2)), y)
