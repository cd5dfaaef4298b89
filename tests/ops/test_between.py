"""A layer between its projections as one call: the bits of its modules one by one, and when it is not one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cake_kda_jit import last_launches, make_plan
from cake_kda_jit.errors import UnsupportedProblemError
from cake_kda_jit.layers import GatedRMSNorm, KimiDeltaAttention, ShortConvolution
from cake_kda_jit.ops import calls

from .graphs import nodes

HIDDEN, HEAD_DIM = 128, 64
NODE = "between_projectionsBackward"


@pytest.fixture(autouse=True)
def no_calls():
    calls._calls.clear()


def make_layer(**options) -> KimiDeltaAttention:
    """A layer that is not one call as a whole, since one of its projections has a hook."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(HIDDEN, 1, HEAD_DIM, **options)
    layer.o_proj.register_forward_hook(lambda *_: None)
    return layer


def run(layer: nn.Module, x: torch.Tensor, plan) -> list[torch.Tensor]:
    """The result and every gradient."""
    leaves = [x.clone().requires_grad_(), *layer.parameters()]
    y = layer(leaves[0], plan=plan)
    return [y, *torch.autograd.grad(y.float().square().sum(), leaves)]


@pytest.mark.parametrize("hooked", ["v_conv1d", "o_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"num_value_heads": 2}, {"lower_bound": -5.0, "output_gate_bias": True}])
def test_modules_one_by_one_have_the_same_bits(options, dtype, hooked, nan_poison):
    layer = make_layer(**options).to(dtype)
    x = torch.randn(1, 100, HIDDEN, dtype=dtype)
    plan = make_plan(
        torch.tensor([0, 40, 40, 93]), num_heads=1, num_value_heads=options.get("num_value_heads"), head_dim=HEAD_DIM,
        device="cpu", max_documents=5, max_tokens=100,
    )  # fmt: skip
    together = [run(layer, x, plan) for _ in range(2)]
    assert nodes(together[0][0]).count(NODE) == 1
    seen = []
    layer.get_submodule(hooked).register_forward_hook(lambda *_: seen.append(hooked))
    alone = run(layer, x, plan)
    assert seen == [hooked] and NODE not in nodes(alone[0])
    for found in together:
        assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))


def test_four_launches_and_two_allocations():
    """And with a gradient a third, of what is kept."""
    layer, x = make_layer(), torch.randn(1, 70, HIDDEN)
    plan = make_plan(torch.tensor([0, 70]), num_heads=1, head_dim=HEAD_DIM, device="cpu")
    layer(x, plan=plan)
    assert [one.program for one in last_launches()] == [
        "conv_forward",
        "chunk_prepare",
        "chunk_scan",
        "gated_norm_forward",
    ]
    [call] = calls._calls.values()
    assert [len(call.forward(keep=keep).run_pass.layouts) for keep in (False, True)] == [2, 3]


def test_another_norm_or_dtype_goes_module_by_module():
    plan = make_plan(torch.tensor([0, 70]), num_heads=1, head_dim=HEAD_DIM, device="cpu")
    x = torch.randn(1, 70, HIDDEN)

    class OtherNorm(GatedRMSNorm):
        def forward(self, x, gate):
            return super().forward(x, gate) * 2

    plain, other = make_layer(), make_layer()
    other.o_norm = OtherNorm(HEAD_DIM)
    assert torch.equal(other(x, plan=plan), 2 * plain(x, plan=plan))  # twice each term of the last projection
    narrow = make_layer(kernel_dtype=torch.bfloat16)(x, plan=plan)
    assert narrow.dtype == torch.float32 and NODE not in nodes(narrow)


def test_a_weight_of_one_convolution_may_be_of_another_width():
    """Then each convolution is a launch of its own."""
    layer, x = make_layer(), torch.randn(1, 70, HIDDEN)
    layer.k_conv1d = ShortConvolution(HEAD_DIM, 3)
    plan = make_plan(torch.tensor([0, 70]), num_heads=1, head_dim=HEAD_DIM, device="cpu")
    with torch.no_grad():
        y = layer(x, plan=plan)
    assert [one.program for one in last_launches()][:3] == ["conv_forward"] * 3
    layer.k_conv1d.register_forward_hook(lambda *_: None)
    assert torch.equal(layer(x, plan=plan), y)


def test_a_weight_of_two_dimensions_goes_module_by_module():
    """``ShortConvolution`` takes it, so a layer does."""
    layer, x = make_layer(), torch.randn(1, 70, HIDDEN)
    expected = layer(x)
    layer.q_conv1d.weight = nn.Parameter(layer.q_conv1d.weight.detach().squeeze(1))
    y = layer(x)
    assert torch.equal(y, expected) and NODE not in nodes(y)


def test_a_norm_that_no_kernel_takes_is_refused_alike():
    layer, x = make_layer(), torch.randn(1, 70, HIDDEN)
    layer.o_norm.weight = nn.Parameter(torch.ones(HEAD_DIM + 1))
    plan = make_plan(torch.tensor([0, 70]), num_heads=1, head_dim=HEAD_DIM, device="cpu")
    for _ in range(2):
        with pytest.raises(UnsupportedProblemError, match="weight has shape"):
            layer(x, plan=plan)
        layer.o_norm.register_forward_hook(lambda *_: None)
