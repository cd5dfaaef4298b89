"""What a layer refuses in its own terms: modules and parameters that are not there, dtypes that kernels do not take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cake_kda_jit import UnsupportedProblemError
from cake_kda_jit.layers import KimiDeltaAttention
from cake_kda_jit.ops import checks

HIDDEN = 32


def make_layer(dtype: torch.dtype = torch.float32, heads: int = 1, **options) -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(HIDDEN, heads, 64, **options).to(dtype)


def make_input(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


WHERE = ({}, {"cu_seqlens": torch.tensor([0, 2, 5])})
"""Calls that may be one call, and calls that go from module to module."""


@pytest.mark.parametrize("where", WHERE, ids=["one call", "by modules"])
@pytest.mark.parametrize(
    "name, kind",
    [
        *[(name, "Linear") for name in ("q_proj", "f_b_proj", "g_a_proj", "b_proj", "o_proj")],
        *[("k_conv1d", "ShortConvolution"), ("o_norm", "GatedRMSNorm")],
    ],
)
def test_a_module_that_is_not_there_is_named(name, kind, where):
    layer, x = make_layer(), make_input()
    expected = layer(x, **where)
    module = getattr(layer, name)
    setattr(layer, name, None)
    with pytest.raises(UnsupportedProblemError, match=f"{name} of the layer is None; accepted: {kind}, or .*; set one"):
        layer(x, **where)
    delattr(layer, name)
    with pytest.raises(
        UnsupportedProblemError, match=f"{name} of the layer is missing; accepted: {kind}, or .*; set one"
    ):
        layer(x, **where)
    setattr(layer, name, module)
    assert torch.equal(layer(x, **where), expected)


@pytest.mark.parametrize("name", ["f_proj", "g_proj"])
def test_so_is_the_projection_of_a_full_gate(name):
    layer = make_layer(low_rank_gate=False)
    setattr(layer, name, None)
    with pytest.raises(UnsupportedProblemError, match=f"{name} of the layer is None; accepted: Linear, or"):
        layer(make_input())


@pytest.mark.parametrize("where", WHERE, ids=["one call", "by modules"])
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_a_parameter_of_the_gate_that_is_not_there_is_named(name, where):
    layer = make_layer()
    setattr(layer, name, None)
    layer.to(torch.bfloat16)  # as any module without one of its parameters
    with pytest.raises(UnsupportedProblemError, match=f"{name} of the layer is None; accepted: a parameter in .*; set"):
        layer(make_input(torch.bfloat16), **where)


def test_a_module_of_the_users_own_is_no_missing_one():
    class Ungated(nn.Module):
        def forward(self, o, gate):
            return o.flatten(-2)

    layer, x = make_layer(), make_input()
    layer.o_norm = Ungated()
    assert torch.isfinite(layer(x)).all()


@pytest.mark.parametrize("module", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kernel", [None, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_every_pair_of_dtypes_runs_or_is_refused_by_kernel_dtype(module, kernel):
    """What projections give in a narrow dtype are the decay's logits too, which kernels take beside their own only."""
    layer, x = make_layer(module, kernel_dtype=kernel), make_input(module)
    taken = (torch.float32, torch.bfloat16, torch.float16)
    if (kernel or module) not in taken:
        message = f"kernel_dtype={kernel}.* on cpu; kernels there take q, k and v as bf16, fp16, fp32: set"
    elif kernel not in (None, module) and module != torch.float32:
        message = f"kernel_dtype={kernel} beside projections that give {module}; .*: set kernel_dtype=None, or"
    else:
        assert layer(x).dtype == module
        return
    with pytest.raises(UnsupportedProblemError, match=message):
        layer(x)


@pytest.mark.parametrize("where", WHERE, ids=["one call", "by modules"])
def test_fp32_on_a_device_without_such_kernels(where, monkeypatch):
    """As on CUDA, for a layer in fp32: by kernel_dtype, and by the projections alone.

    Its three heads are no other test's: a prepared call of these layouts would need no check.
    """
    monkeypatch.setitem(checks.DEVICE_DTYPES, "cpu", checks.DEVICE_DTYPES["cuda"])
    advice = "kernels there take q, k and v as bf16, fp16: set kernel_dtype to one of them"
    with pytest.raises(UnsupportedProblemError, match=f"kernel_dtype=torch.float32 on cpu; {advice}"):
        make_layer(heads=3, kernel_dtype=torch.float32)(make_input(), **where)
    with pytest.raises(
        UnsupportedProblemError, match=f"kernel_dtype=None and projections that give torch.float32 on cpu; {advice}"
    ):
        make_layer(heads=3)(make_input(), **where)
    assert make_layer(heads=3, kernel_dtype=torch.bfloat16)(make_input(), **where).dtype == torch.float32


def test_what_is_no_dtype_and_autocast():
    layer = make_layer(kernel_dtype="bf16")
    with pytest.raises(UnsupportedProblemError, match="kernel_dtype='bf16'; give a torch.dtype, or None"):
        layer(make_input())
    layer.kernel_dtype = torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(UnsupportedProblemError, match="kernel_dtype=torch.float32 beside .* out of autocast"):
            layer(make_input())
        layer.kernel_dtype = torch.bfloat16
        layer(make_input())
