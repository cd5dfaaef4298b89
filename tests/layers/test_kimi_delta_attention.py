"""The layer against the same layer written with the FP64 references, and what loading and casting must keep."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from cake_kda_jit import UnsupportedProblemError, make_plan
from cake_kda_jit.layers import KimiDeltaAttention
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


def reference_forward(p: dict[str, torch.Tensor], x: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """The published order of operations on FP64 parameters ``p``, for the documents of ``CU_SEQLENS``."""

    def projected(name):
        y = functional.linear(x, p[f"{name}_proj.weight"])
        y = causal_conv1d_reference(y, p[f"{name}_conv1d.weight"].squeeze(1), cu_seqlens=CU_SEQLENS)[0]
        return y.unflatten(-1, (-1, HEAD_DIM))

    def low_rank(name):
        inner = functional.linear(x, p[f"{name}_a_proj.weight"])
        return functional.linear(inner, p[f"{name}_b_proj.weight"]).unflatten(-1, (-1, HEAD_DIM))

    o, _ = recurrent_kda(
        projected("q"), projected("k"), projected("v"), low_rank("f"), functional.linear(x, p["b_proj.weight"]),
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        A_log=p["A_log"], dt_bias=p["dt_bias"], lower_bound=lower_bound, cu_seqlens=CU_SEQLENS,
    )
    o = functional.rms_norm(o, (HEAD_DIM,), p["o_norm.weight"], eps=1e-5) * low_rank("g").sigmoid()
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
        ({"kernel_dtype": torch.bfloat16}, BF16_TOLERANCE),
    ],
    ids=["softplus", "bounded, grouped heads", "bf16 on the kernels"],
)
def test_forward_and_every_gradient_equal_the_reference(options, tolerance, nan_poison):
    layer, x = make_layer(**options), make_input().requires_grad_()
    o = layer(x, cu_seqlens=torch.tensor(CU_SEQLENS, dtype=torch.int32))
    direction = torch.randn(o.shape, generator=torch.Generator().manual_seed(2))
    actual = gradients(o, direction, {"x": x, **dict(layer.named_parameters())})

    exact = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    x64 = x.detach().double().requires_grad_()
    o64 = reference_forward(exact, x64, options.get("lower_bound"))
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


def test_a_published_checkpoint_loads():
    source, layer = make_layer(), KimiDeltaAttention(HIDDEN, HEADS, HEAD_DIM)
    published = {f"attention.{name}": value for name, value in source.state_dict().items()}
    published["attention.A_log"] = published["attention.A_log"].view(1, 1, HEADS, 1)
    torch.nn.ModuleDict({"attention": layer}).load_state_dict(published)
    for name, value in source.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value), name
    assert published["attention.A_log"].shape == (1, 1, HEADS, 1), "the caller's checkpoint is left alone"


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
