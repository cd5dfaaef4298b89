"""A layer as one call: the bits of its modules one by one, what is kept from it, and when it is not one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cake_kda_jit import last_launches, make_plan
from cake_kda_jit.errors import UnsupportedProblemError
from cake_kda_jit.layers import GatedRMSNorm, KimiDeltaAttention, ShortConvolution
from cake_kda_jit.ops import calls

from .graphs import nodes

HIDDEN, HEAD_DIM, TOKENS = 128, 64, 100
WHOLE, BETWEEN = "kimi_delta_attentionBackward", "between_projectionsBackward"
OPTIONS = {
    "plain": {},
    "grouped": {"num_value_heads": 2},
    "bias": {"lower_bound": -5.0, "output_gate_bias": True},
    "full rank": {"low_rank_gate": False, "allow_neg_eigval": True},
    "full rank, bias": {"low_rank_gate": False, "output_gate_bias": True},
}
OF_X = ("q_proj", "k_proj", "v_proj", "f_a_proj", "b_proj", "g_a_proj")


@pytest.fixture(autouse=True)
def no_calls():
    calls._calls.clear()


def make_layer(dtype: torch.dtype = torch.float32, **options) -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(HIDDEN, 1, HEAD_DIM, **options).to(dtype)


def make_x(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(1, TOKENS, HIDDEN, dtype=dtype)


def plan_of(num_value_heads: int | None = None, **limits):
    sizes = {"num_heads": 1, "num_value_heads": num_value_heads, "head_dim": HEAD_DIM, "device": "cpu"}
    return make_plan(torch.tensor([0, 40, 40, 93 if limits else TOKENS]), **sizes, **limits)


def run(layer: KimiDeltaAttention, x: torch.Tensor, **documents) -> dict[str, torch.Tensor]:
    """The result and every gradient that is wanted, by name."""
    x = x.clone().requires_grad_()
    y = layer(x, **documents)
    leaves = {"x": x} | {name: p for name, p in layer.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(y.float().square().sum(), list(leaves.values()))
    return {"y": y.detach(), **dict(zip(leaves, found))}


def assert_equal_but_x(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if name != "x" and not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("documents", ["plan", "capacity", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_modules_one_by_one_have_the_same_bits(options, dtype, documents, nan_poison):
    """But for x, whose gradient ``test_the_gradient_of_x`` holds to its products."""
    layer, x = make_layer(dtype, **OPTIONS[options]), make_x(dtype)
    heads = OPTIONS[options].get("num_value_heads")
    plan = {
        "plan": lambda: plan_of(heads),
        "capacity": lambda: plan_of(heads, max_documents=5, max_tokens=TOKENS),
        "batch": lambda: None,
    }[documents]()
    if plan is None:
        x = x.view(2, TOKENS // 2, HIDDEN)
    together = [run(layer, x, plan=plan) for _ in range(2)]
    assert [name for name in nodes(layer(x, plan=plan)) if "Accumulate" not in name] == [WHOLE]
    layer.q_proj.register_forward_hook(lambda *_: None)
    assert BETWEEN in nodes(layer(x, plan=plan))
    alone = run(layer, x, plan=plan)
    assert torch.equal(together[0]["x"], together[1]["x"])
    for found in together:
        assert_equal_but_x(found, alone)


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-8)], ids=str)
def test_the_gradient_of_x(dtype, unit):
    """A sum of six products, in which each product and each partial sum is rounded at most once.

    The products themselves are sums of 64 fp32 terms, whose own roundings are less than 64 units of fp32 of the
    absolute terms. A hundredth is for roundings of what has been rounded.
    """
    layer, x = make_layer(dtype), make_x(dtype)
    found = run(layer, x, plan=plan_of())["x"].double()
    directions = {}
    for name in OF_X:
        layer.get_submodule(name).register_full_backward_hook(
            lambda _, __, given, name=name: directions.update({name: given[0].double()})
        )
    run(layer, x, plan=plan_of())
    total = bound = torch.zeros_like(found)
    for name in reversed(OF_X):
        weight = layer.get_submodule(name).weight.detach().double()
        product = directions[name] @ weight
        total = total + product
        bound = bound + unit * (product.abs() + total.abs()) + 64 * 2**-24 * (directions[name].abs() @ weight.abs())
    assert ((found - total).abs() <= 1.01 * bound).all()


def test_four_launches_in_one_node(nan_poison):
    """Forward and backward together are what the modules launch one by one."""
    layer, x, plan = make_layer(), make_x().requires_grad_(), plan_of()
    y = layer(x, plan=plan)
    assert [one.program for one in last_launches()] == [
        "conv_forward",
        "chunk_prepare",
        "chunk_scan",
        "gated_norm_forward",
    ]
    y.sum().backward()
    assert last_launches()[0].program == "gated_norm_backward" and last_launches()[-1].program == "conv_backward"
    assert len(calls._calls) == 1


@pytest.mark.parametrize("trained", [("o_proj.weight",), ("f_a_proj.weight", "A_log"), ("x",), ("q_proj.weight", "x")])
def test_only_some_are_trained(trained):
    layer, x, plan = make_layer(), make_x(), plan_of()
    expected = run(layer, x, plan=plan)
    layer.requires_grad_(False)
    for name in trained:
        if name != "x":
            layer.get_parameter(name).requires_grad_(True)
    x.requires_grad_("x" in trained)
    y = layer(x, plan=plan)
    leaves = [x if name == "x" else layer.get_parameter(name) for name in trained]
    found = torch.autograd.grad(y.square().sum(), leaves)
    assert all(torch.equal(one, expected[name]) for name, one in zip(trained, found, strict=True))
    assert nodes(y).count(WHOLE) == 1


def test_without_a_gradient():
    layer, x, plan = make_layer(), make_x(), plan_of()
    expected = run(layer, x, plan=plan)["y"]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = layer(x, plan=plan)
        assert torch.equal(y, expected) and not y.requires_grad


def test_what_is_not_one_call():
    """Then its modules are called, and torch has its say about them."""
    layer, x, plan = make_layer(), make_x(), plan_of()
    expected = layer(x, plan=plan)
    strided = torch.cat([x, x], dim=-1)[..., :HIDDEN]
    for y in (layer(strided, plan=plan), layer(x, cu_seqlens=plan.cu_seqlens)):
        assert WHOLE not in nodes(y) and torch.equal(y, expected)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, plan=plan)
    assert WHOLE not in nodes(y) and y.dtype == torch.bfloat16
    same = make_layer(kernel_dtype=torch.float32)(x, plan=plan)
    assert WHOLE in nodes(same) and torch.equal(same, expected)
    narrow = make_layer(kernel_dtype=torch.bfloat16)(x, plan=plan)
    assert WHOLE not in nodes(narrow) and narrow.dtype == torch.float32
    with pytest.raises(RuntimeError, match="dtype"):
        layer(x.bfloat16(), plan=plan)
    with pytest.raises(RuntimeError, match="shape"):
        layer(x[..., :-1].contiguous(), plan=plan)
    assert layer(x[:, :0]).shape == (1, 0, HIDDEN)


def test_a_bias_elsewhere_goes_module_by_module():
    layer, x, plan = make_layer(), make_x(), plan_of()
    layer.o_proj = torch.nn.Linear(HEAD_DIM, HIDDEN)
    y = layer(x, plan=plan)
    assert WHOLE not in nodes(y) and BETWEEN in nodes(y)
    other = copy.deepcopy(layer)
    other.o_proj.bias = None
    assert WHOLE in nodes(other(x, plan=plan))
    # A product adds its bias before or behind 64 terms, in fp32: torch's tolerance for that is meant for such sums.
    torch.testing.assert_close(other(x, plan=plan) + layer.o_proj.bias, y)


def test_a_gradient_twice_and_checkpointing():
    layer, x, plan = make_layer(), make_x().requires_grad_(), plan_of()
    leaves = [x, *layer.parameters()]
    loss = layer(x, plan=plan).square().sum()
    first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    for use_reentrant in (True, False):
        loss = checkpoint(lambda x: layer(x, plan=plan), x, use_reentrant=use_reentrant).square().sum()
        loss.backward()
        found = [leaf.grad for leaf in leaves]
        assert all(torch.equal(*three[:2]) and torch.equal(*three[1:]) for three in zip(first, second, found))
        for leaf in leaves:
            leaf.grad = None


def test_saved_tensors_may_come_back_with_other_strides():
    layer, x, plan = make_layer(), make_x(), plan_of()
    layer.q_proj.weight = torch.nn.Parameter(layer.q_proj.weight.detach().t().contiguous().t())
    expected = run(layer, x, plan=plan)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous().clone(), lambda t: t):
        found = run(layer, x, plan=plan)
    assert_equal_but_x(found, expected)
    # A product may add its 64 terms in another order for other strides: torch's tolerance for fp32 is meant for that.
    torch.testing.assert_close(found["x"], expected["x"])


@pytest.mark.parametrize("function", [torch.Tensor.sum, lambda y: y.square().sum()], ids=["linear", "square"])
@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "frozen"])
def test_a_second_derivative_is_refused(is_trained, function):
    """Also where only the layer's input leads to it: it must not seem to be 0."""
    layer, x, plan = make_layer().requires_grad_(is_trained), make_x().requires_grad_(), plan_of()
    [first] = torch.autograd.grad(function(layer(x, plan=plan)), x, create_graph=True)
    with pytest.raises(UnsupportedProblemError, match="kimi_delta_attention_backward has no gradient"):
        torch.autograd.grad(first.sum(), x, allow_unused=True)


def test_the_result_may_be_changed_in_place():
    """As that of an ``nn.Linear``: a residual is often added so."""
    layer, x, plan = make_layer(), make_x(), plan_of()
    expected = run(layer, x, plan=plan)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            y = layer(x, plan=plan)
        y += torch.zeros(HIDDEN, requires_grad=True)
        assert torch.equal(y, expected["y"])
        y.square().sum().backward()
    assert torch.equal(layer.A_log.grad, expected["A_log"])


def test_a_backward_under_autocast_is_that_of_its_forward():
    layer, x, plan = make_layer(), make_x().requires_grad_(), plan_of()
    leaves = [x, *layer.parameters()]
    loss = layer(x, plan=plan).square().sum()
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(loss, leaves)
    assert all(map(torch.equal, found, expected))


def test_what_no_gradient_reads_is_not_kept():
    """So it may change after the forward, as where torch has a node for each projection."""
    trained = ("A_log", "f_b_proj.weight")
    layer, x, plan = make_layer(), make_x(), plan_of()
    expected = run(layer, x, plan=plan)
    for name, one in layer.named_parameters():
        one.requires_grad_(name in trained)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = layer(x, plan=plan)
    x.zero_()
    y.square().sum().backward()
    assert all(torch.equal(layer.get_parameter(name).grad, expected[name]) for name in trained)
    assert x.shape not in kept


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (lambda t: t.half() if t.shape[1:] == (1, 4) else t, "float16 .*64, 1, 4.* on cpu for torch.float32"),
        (lambda t: t[:-1] if t.dtype == torch.int32 else t, r"int32 \[1, 4\] on cpu for torch.int32 \[2, 4\]"),
        (lambda t: t.to("meta") if t.dtype == torch.uint8 else t, "uint8 .* on meta for torch.uint8 .* on cpu"),
        (lambda t: t[256:] if t.dtype == torch.uint8 else t, "uint8 .* on cpu for torch.uint8"),
        (
            lambda t: t[:, 1:] if t.shape == (HIDDEN, HEAD_DIM) else t,
            r"float32 \[128, 63\] on cpu for torch.float32 \[",
        ),
    ],
    ids=["dtype", "shape", "device", "kept", "last weight"],
)
def test_saved_tensors_that_come_back_as_others_are_refused(change, given):
    layer, x, plan = make_layer(), make_x(), plan_of()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, change):
        y = layer(x, plan=plan)
    with pytest.raises(
        UnsupportedProblemError,
        match=f"^kimi_delta_attention_backward is given torch.{given}.*; hooks on saved tensors must",
    ):
        y.sum().backward()


@pytest.mark.parametrize(
    "change",
    [lambda t: t.half() if t.shape == (1, TOKENS, HIDDEN) else t,
     lambda t: t.view(1, TOKENS // 2, 2 * HIDDEN) if t.shape == (1, TOKENS, HIDDEN) else t],
    ids=["dtype", "shape"],
)  # fmt: skip
def test_so_is_x_by_torchs_products(change):
    layer, x, plan = make_layer(), make_x(), plan_of()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, change):
        y = layer(x, plan=plan)
    with pytest.raises(RuntimeError, match="dtype|shape"):
        y.sum().backward()


def test_what_a_subclass_does_between_its_projections_is_done():
    class Nothing(KimiDeltaAttention):
        def between_projections(self, given, **_):
            return torch.zeros(1, TOKENS, HEAD_DIM)

    assert not Nothing(HIDDEN, 1, HEAD_DIM)(make_x()).any()


@pytest.mark.parametrize("kind", [torch.nn.Linear, ShortConvolution, GatedRMSNorm])
def test_what_somebody_has_put_in_a_class_is_called(kind, monkeypatch):
    layer, x, plan = make_layer(), make_x(), plan_of()
    expected, own = layer(x, plan=plan), kind.forward
    monkeypatch.setattr(kind, "forward", lambda *given, **documents: 0 * own(*given, **documents))
    y = layer(x, plan=plan)
    assert not y.any() and {WHOLE, BETWEEN}.isdisjoint(nodes(y))
    monkeypatch.undo()
    assert torch.equal(layer(x, plan=plan), expected)


@pytest.mark.parametrize("changed", ["q_proj.weight", "o_norm.weight", "plan"])
def test_what_has_changed_since_the_forward_is_noticed(changed):
    layer, x = make_layer(), make_x()
    plan = plan_of(max_documents=5, max_tokens=TOKENS)
    y = layer(x, plan=plan)
    with torch.no_grad():
        plan.update(torch.tensor([0, 10])) if changed == "plan" else layer.get_parameter(changed).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_gradient_of_any_strides_or_none():
    layer, x, plan = make_layer(), make_x().requires_grad_(), plan_of()
    expanded = torch.autograd.grad(layer(x, plan=plan).sum(), x)
    given = torch.autograd.grad(layer(x, plan=plan), x, torch.ones(1, HIDDEN, TOKENS).transpose(1, 2))
    assert torch.equal(*expanded, *given)
