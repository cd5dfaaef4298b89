"""A layer as one call on a CUDA device: the bits of its modules one by one, and the gradient of its input."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from cake_kda_jit import last_launches, make_plan
from cake_kda_jit.layers import KimiDeltaAttention

pytestmark = pytest.mark.gpu

HEADS, HEAD_DIM, HIDDEN, TOKENS = 4, 128, 512, 1000
OF_X = {True: ("q_proj", "k_proj", "v_proj", "f_a_proj", "b_proj", "g_a_proj"),
        False: ("q_proj", "k_proj", "v_proj", "f_proj", "b_proj", "g_proj")}  # fmt: skip


def make_layer(**options) -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM, **options).cuda().bfloat16()


def make_plan_of(*lengths: int):
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    return make_plan(boundaries, num_heads=HEADS, head_dim=HEAD_DIM, device="cuda")


def run(layer: KimiDeltaAttention, x: torch.Tensor, plan) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The result and every gradient by name, and the programs of the forward."""
    x = x.clone().requires_grad_()
    y = layer(x, plan=plan)
    launched = [one.program for one in last_launches()]
    leaves = {"x": x} | dict(layer.named_parameters())
    direction = torch.randn(y.shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda").bfloat16()
    found = torch.autograd.grad(y, list(leaves.values()), direction)
    return {"y": y.detach(), **dict(zip(leaves, found))}, launched


class Seen(TorchDispatchMode):
    """Writes down what is called. Under a mode a layer calls its modules, and these their operators."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.seen.append(str(function))
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("with_plan", [True, False])
@pytest.mark.parametrize("options", [{}, {"low_rank_gate": False, "output_gate_bias": True, "lower_bound": -5.0}])
def test_modules_one_by_one_have_the_same_bits(options, with_plan):
    """But for x: in its gradient each of six products and each partial sum is rounded at most once, by 2^-8 of it.

    The products' own fp32 sums are of 512 terms, whose roundings are less than 512 units of fp32 of the absolute terms.
    A hundredth is for roundings of what has been rounded.
    """
    layer = make_layer(**options)
    x = torch.randn(1 if with_plan else 2, TOKENS, HIDDEN, device="cuda").bfloat16()
    plan = make_plan_of(300, 0, 1, 699) if with_plan else None
    seen: list[str] = []
    together, launched = run(layer, x, plan)
    again, _ = run(layer, x, plan)
    assert launched == ["conv_forward", "chunk_prepare", "chunk_scan", "gated_norm_forward"]
    assert all(torch.equal(one, other) for one, other in zip(together.values(), again.values()))
    with Seen(seen):
        alone, _ = run(layer, x, plan)
    assert "cake_kda_jit.chunk_kda_forward.default" in seen
    assert [name for name in together if name != "x" and not torch.equal(together[name], alone[name])] == []

    directions = {}
    for name in OF_X[layer.low_rank_gate]:
        layer.get_submodule(name).register_full_backward_hook(
            lambda _, __, given, name=name: directions.update({name: given[0].double()})
        )
    run(layer, x, plan)
    total = bound = torch.zeros_like(x, dtype=torch.float64)
    for name in reversed(OF_X[layer.low_rank_gate]):
        weight = layer.get_submodule(name).weight.detach().double()
        product = directions[name] @ weight
        total = total + product
        bound = bound + 2**-8 * (product.abs() + total.abs()) + 512 * 2**-24 * (directions[name].abs() @ weight.abs())
    assert ((together["x"].double() - total).abs() <= 1.01 * bound).all()


def test_a_frozen_layer_keeps_no_gradient_of_its_weights():
    """Fewer products, the same gradient of x."""
    layer, plan = make_layer(), make_plan_of(TOKENS)
    x = torch.randn(1, TOKENS, HIDDEN, device="cuda").bfloat16().requires_grad_()
    [expected] = torch.autograd.grad(layer(x, plan=plan).sum(), x)
    layer.requires_grad_(False)
    y = layer(x, plan=plan)
    assert isinstance(y.grad_fn, BackwardCFunction)
    [found] = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, expected)
