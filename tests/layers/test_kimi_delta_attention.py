"""The layer against the same layer written with the FP64 references, and what loading and casting must keep."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from cake_kda_jit import KdaOptions, UnsupportedProblemError, make_plan
from cake_kda_jit.layers import FLA_NAMES, KIMI_LINEAR_PREFIX, KimiDeltaAttention, attention_weights
from cake_kda_jit.reference import causal_conv1d_reference, recurrent_kda

HIDDEN, HEADS, HEAD_DIM = 48, 2, 64
CU_SEQLENS = [0, 70, 70, 71, 100]  # more than one chunk, an empty document, one token, a short tail

# fp32 sums of up to a few hundred terms differ from FP64 by about 1e-6 of the largest value; ten times that.
FP32_TOLERANCE = 1e-5
# q, k, v before and after the convolutions, o and their gradients are rounded to bf16: a few times 2^-9.
BF16_TOLERANCE = 1e-2


def make_layer(**options) -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM, **options)


def make_input(tokens: int = CU_SEQLENS[-1], batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, tokens, HIDDEN, generator=torch.Generator().manual_seed(1))


def reference_forward(p: dict[str, torch.Tensor], x: torch.Tensor, options: dict[str, object]) -> torch.Tensor:
    """The published order of operations on FP64 parameters ``p``, for the documents of ``CU_SEQLENS``."""

    def projected(name):
        y = functional.linear(x, p[f"{name}_proj.weight"])
        y = causal_conv1d_reference(y, p[f"{name}_conv1d.weight"].squeeze(1), cu_seqlens=CU_SEQLENS)[0]
        return y.unflatten(-1, (-1, HEAD_DIM))

    def logits(name):
        inner, last = x, f"{name}_proj"
        if f"{name}_a_proj.weight" in p:
            inner, last = functional.linear(x, p[f"{name}_a_proj.weight"]), f"{name}_b_proj"
        return functional.linear(inner, p[f"{last}.weight"], p.get(f"{last}.bias")).unflatten(-1, (-1, HEAD_DIM))

    o, _ = recurrent_kda(
        projected("q"),
        projected("k"),
        projected("v"),
        logits("f"),
        functional.linear(x, p["b_proj.weight"]),
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        A_log=p["A_log"],
        dt_bias=p["dt_bias"],
        lower_bound=options.get("lower_bound"),
        cu_seqlens=CU_SEQLENS,
        allow_neg_eigval=options.get("allow_neg_eigval", False),
    )
    o = functional.rms_norm(o, (HEAD_DIM,), p["o_norm.weight"], eps=1e-5) * logits("g").sigmoid()
    return functional.linear(o.flatten(-2), p["o_proj.weight"])


def gradients(output, direction, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(output, list(leaves.values()), direction.to(output.dtype))
    return dict(zip(leaves, found))


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str = "") -> None:
    assert actual.shape == expected.shape, what
    assert torch.isfinite(actual).all(), what
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error <= tolerance, f"{what}: {error:.1e}"


@pytest.mark.parametrize(
    "options, tolerance",
    [
        ({}, FP32_TOLERANCE),
        ({"num_value_heads": 4, "lower_bound": -5.0, "conv_size": 3}, FP32_TOLERANCE),
        ({"low_rank_gate": False, "allow_neg_eigval": True}, FP32_TOLERANCE),
        ({"low_rank_gate": False, "lower_bound": -5.0, "output_gate_bias": True}, FP32_TOLERANCE),
        ({"output_gate_bias": True}, FP32_TOLERANCE),
        ({"kernel_dtype": torch.bfloat16}, BF16_TOLERANCE),
    ],
    ids=["softplus", "bounded, grouped heads", "full gate", "full bounded gate", "bias", "bf16 on the kernels"],
)
def test_forward_and_every_gradient_equal_the_reference(options, tolerance, nan_poison):
    layer, x = make_layer(**options), make_input().requires_grad_()
    o = layer(x, cu_seqlens=torch.tensor(CU_SEQLENS, dtype=torch.int32))
    direction = torch.randn(o.shape, generator=torch.Generator().manual_seed(2))
    actual = gradients(o, direction, {"x": x, **dict(layer.named_parameters())})

    exact = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    x64 = x.detach().double().requires_grad_()
    o64 = reference_forward(exact, x64, options)
    expected = gradients(o64, direction, {"x": x64, **exact})

    assert o.shape == x.shape and o.dtype == x.dtype
    assert_near(o, o64, tolerance, "o")
    for name in expected:
        # The gradients of the gate's parameters are sums over tokens that cancel in part.
        slack = 4 if name in ("A_log", "dt_bias") else 1
        assert_near(actual[name], expected[name], slack * tolerance, name)


def test_a_pack_equals_its_documents_and_a_plan_equals_cu_seqlens():
    layer, x = make_layer(), make_input()
    cu_seqlens = torch.tensor(CU_SEQLENS)
    packed = layer(x, cu_seqlens=cu_seqlens)
    plan = make_plan(cu_seqlens, num_heads=HEADS, head_dim=HEAD_DIM, device="cpu")
    assert torch.equal(layer(x, plan=plan), packed)
    for start, end in zip(CU_SEQLENS, CU_SEQLENS[1:]):
        if end > start:
            # The kernels give the same bits; the projections' matrix products may sum in another order.
            assert_near(packed[:, start:end], layer(x[:, start:end]), FP32_TOLERANCE, f"tokens {start} to {end}")


def test_batch_rows_are_documents():
    layer, x = make_layer(), make_input(tokens=40, batch=3)
    rows = torch.cat([layer(row.unsqueeze(0)) for row in x])
    assert_near(layer(x), rows, FP32_TOLERANCE)


def test_parameters_are_named_and_shaped_as_published():
    shapes = {name: tuple(p.shape) for name, p in KimiDeltaAttention(96, 2, 64, num_value_heads=4).named_parameters()}
    assert shapes == {
        "q_proj.weight": (128, 96),
        "k_proj.weight": (128, 96),
        "v_proj.weight": (256, 96),
        "q_conv1d.weight": (128, 1, 4),
        "k_conv1d.weight": (128, 1, 4),
        "v_conv1d.weight": (256, 1, 4),
        "f_a_proj.weight": (64, 96),
        "f_b_proj.weight": (256, 64),
        "A_log": (4,),
        "dt_bias": (256,),
        "b_proj.weight": (4, 96),
        "g_a_proj.weight": (64, 96),
        "g_b_proj.weight": (256, 64),
        "o_norm.weight": (64,),
        "o_proj.weight": (96, 256),
    }


def test_a_full_gate_is_one_projection():
    layer = KimiDeltaAttention(96, 2, 64, low_rank_gate=False, output_gate_bias=True)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters() if name[:2] in ("f_", "g_")}
    assert shapes == {"f_proj.weight": (128, 96), "g_proj.weight": (128, 96), "g_proj.bias": (128,)}


@pytest.mark.parametrize("low_rank_gate", [1, 0, None])
def test_what_says_whether_a_gate_is_low_rank_need_be_no_bool(low_rank_gate):
    layer, x = make_layer(low_rank_gate=low_rank_gate), make_input()
    assert torch.equal(layer(x), make_layer(low_rank_gate=bool(low_rank_gate))(x))


def published_checkpoint(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A state dict with the names, shapes and dtypes of a Kimi Linear checkpoint, two layers and more around them."""
    generator = torch.Generator().manual_seed(3)
    size = HEADS * HEAD_DIM
    shapes = {
        **{f"{name}_proj.weight": (size, HIDDEN) for name in "qkv"},
        **{f"{name}_conv1d.weight": (size, 1, 4) for name in "qkv"},
        **{f"{name}_a_proj.weight": (HEAD_DIM, HIDDEN) for name in "fg"},
        **{f"{name}_b_proj.weight": (size, HEAD_DIM) for name in "fg"},
        "b_proj.weight": (HEADS, HIDDEN),
        "A_log": (1, 1, HEADS, 1),
        "dt_bias": (size,),
        "o_norm.weight": (HEAD_DIM,),
        "o_proj.weight": (HIDDEN, size),
    }
    checkpoint = {"model.embed_tokens.weight": torch.zeros(8, HIDDEN, dtype=dtype)}
    for layer in range(2):
        for name, shape in shapes.items():
            kept = torch.float32 if name in ("A_log", "dt_bias") else dtype
            checkpoint[f"model.layers.{layer}.self_attn.{name}"] = torch.randn(shape, generator=generator).to(kept)
        checkpoint[f"model.layers.{layer}.mlp.gate_proj.weight"] = torch.zeros(4, HIDDEN, dtype=dtype)
    return checkpoint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_published_checkpoint_loads(dtype):
    checkpoint = published_checkpoint(dtype)
    prefix = KIMI_LINEAR_PREFIX.format(layer=1)
    layer = make_layer().to(dtype)
    layer.load_state_dict(attention_weights(checkpoint, prefix))
    for name, value in layer.state_dict().items():
        assert torch.equal(value, checkpoint[prefix + name].reshape(value.shape)), name
        assert value.dtype == checkpoint[prefix + name].dtype, name
    assert checkpoint[prefix + "A_log"].shape == (1, 1, HEADS, 1), "the caller's checkpoint is left alone"


def test_a_published_checkpoint_loads_into_a_whole_model():
    """With the module at the published place, load_state_dict alone is enough."""
    checkpoint = published_checkpoint(torch.float32)
    layers = [torch.nn.ModuleDict({"self_attn": make_layer()}) for _ in range(2)]
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})})
    result = model.load_state_dict(checkpoint, strict=False)
    assert not result.missing_keys and not [key for key in result.unexpected_keys if "self_attn" in key]
    assert torch.equal(layers[0]["self_attn"].A_log, checkpoint["model.layers.0.self_attn.A_log"].flatten())


def test_weights_of_flash_linear_attentions_layer():
    source = make_layer(output_gate_bias=True)
    theirs = {ours: name for name, ours in FLA_NAMES.items()}
    checkpoint = {}
    for key, value in source.state_dict().items():
        module, dot, parameter = key.rpartition(".")
        checkpoint[f"attn.{theirs.get(module, module)}{dot}{parameter}"] = value
    assert "attn.g_proj.1.bias" in checkpoint and "attn.f_proj.0.weight" in checkpoint
    layer = KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM, output_gate_bias=True)
    layer.load_state_dict(attention_weights(checkpoint, "attn."))
    x = make_input()
    assert torch.equal(layer(x), source(x))


def test_a_prefix_without_weights_is_an_error():
    with pytest.raises(UnsupportedProblemError, match="no weight below 'layers.9.'; it begins with model.embed_tokens"):
        attention_weights(published_checkpoint(torch.float32), "layers.9.")


def test_the_gate_starts_in_the_published_range():
    layer = KimiDeltaAttention(HIDDEN, 16, HEAD_DIM)
    assert 0 <= layer.A_log.min() and layer.A_log.max() <= math.log(16)
    dt = functional.softplus(layer.dt_bias)
    assert 0.999e-3 <= dt.min() and dt.max() <= 0.1001
    assert dt.log().std() > 1, "spread over the whole range: a uniform logarithm has a deviation of 1.33"


def test_casting_the_module_leaves_the_gate_in_fp32():
    layer = make_layer()
    A_log, dt_bias = layer.A_log.detach().clone(), layer.dt_bias.detach().clone()
    x = make_input().bfloat16()
    layer = torch.nn.Sequential(layer).bfloat16()[0]
    o = layer(x, cu_seqlens=torch.tensor(CU_SEQLENS))
    o.float().square().sum().backward()
    assert o.dtype == layer.q_proj.weight.dtype == torch.bfloat16
    assert torch.equal(layer.A_log, A_log) and torch.equal(layer.dt_bias, dt_bias)
    dA_log = layer.A_log.grad.clone()
    layer.half()
    assert layer.A_log.grad.dtype == torch.float32 and torch.equal(layer.A_log.grad, dA_log)
    assert layer.q_proj.weight.dtype == torch.float16


def test_heads_that_cannot_be_grouped_are_refused():
    with pytest.raises(UnsupportedProblemError, match="num_value_heads=3.*multiple"):
        KimiDeltaAttention(HIDDEN, 2, HEAD_DIM, num_value_heads=3)


def test_what_belongs_to_the_call_is_passed_on():
    layer, x = make_layer(), make_input()
    with pytest.raises(UnsupportedProblemError, match="checkpoint_tokens=65"):
        layer(x, options=KdaOptions(checkpoint_tokens=65))
    with pytest.raises(UnsupportedProblemError, match="cp_context is str"):
        layer(x, cp_context="ranks")


def test_a_gate_that_something_cast_is_refused_with_the_recipe():
    layer = make_layer()
    layer.A_log.data = layer.A_log.data.bfloat16()
    with pytest.raises(UnsupportedProblemError, match="A_log arrived in the layer as torch.bfloat16.*FSDP2"):
        layer(make_input())
