"""The convolution on a CUDA device: against FP64 autograd, outputs poisoned with NaN, and what changes no bit."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from cake_kda_jit import causal_conv1d, last_launches
from cake_kda_jit.errors import UnsupportedProblemError
from cake_kda_jit.programs.conv_backward import workspace_bytes
from cake_kda_jit.programs.conv_forward import join_parts, tile_tokens
from cake_kda_jit.runtime.device import arch_of_device
from cake_kda_jit.runtime.load import get_kernel

from ..programs.convolutions import (
    DTYPES,
    FP32_ERROR,
    ConvPack,
    assert_equal_bits,
    assert_near,
    backward_values,
    forward_values,
    make_pack,
    record_of,
    reference,
    run_together,
)
from .twins import on_device

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_poison")]

NARROW = {name: DTYPES[name] for name in ("bf16", "fp16")}
LENGTHS = (0, 1, 64, 2, 0, 3, 1000, 5, 0)
# The device's exponential and reciprocal are off by a unit or two each, where the cpu family rounds exactly.
DEVICE_ERROR = 4 * FP32_ERROR


def to_device(pack: ConvPack) -> ConvPack:
    moved = {field.name: getattr(pack, field.name) for field in fields(pack)}
    return ConvPack(**{n: on_device(value) if isinstance(value, Tensor) else value for n, value in moved.items()})


def run(pack: ConvPack) -> dict[str, Tensor]:
    """Outputs and gradients by the public operation on the device; returned on the cpu."""
    given = to_device(pack)
    names = ("x", "weight", "bias", "initial_state")
    leaves = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    for leaf in leaves.values():
        leaf.requires_grad_()
    y, final_state = causal_conv1d(
        leaves["x"][None],
        leaves["weight"],
        leaves.get("bias"),
        activation="silu" if given.use_silu else None,
        initial_state=leaves.get("initial_state"),
        output_final_state=True,
        cu_seqlens=given.cu_seqlens,
    )
    assert [launched.family for launched in last_launches()] == ["smxx"]
    outputs, gradients = [y], [given.dy[None]]
    if given.dfinal_state is not None:
        outputs.append(final_state)
        gradients.append(given.dfinal_state)
    torch.autograd.backward(outputs, gradients)
    found = {"y": y.detach()[0], "final_state": final_state.detach()}
    return {name: tensor.cpu() for name, tensor in (found | {"d" + n: leaf.grad for n, leaf in leaves.items()}).items()}


def assert_right(pack: ConvPack) -> dict[str, Tensor]:
    found = run(pack)
    assert_near(found, reference(pack), pack, DEVICE_ERROR)
    return found


def launch_on_device(program: str, pack: ConvPack, **changes) -> dict[str, Tensor]:
    """Launch the library itself, with changed arguments, into outputs full of NaN; returns them on the cpu."""
    given = to_device(pack)
    values, outputs = (forward_values if program == "conv_forward" else backward_values)(given)
    del values["num_threads"]
    tokens, channels = given.x.shape
    values |= {"num_tokens": tokens, "tile_tokens": tile_tokens(tokens, channels)}
    if program == "conv_backward":
        size = workspace_bytes(tokens, channels, given.weight.shape[1])
        workspace = torch.full((size // 4,), float("nan"), device="cuda")
        values |= {"workspace": workspace.data_ptr(), "workspace_bytes": size}
    record = record_of(program, given.x.dtype, "smxx")
    kernel = get_kernel(record, arch_of_device(given.x.device))
    try:
        kernel.launch(join_parts(record.entry, [values | changes]))
    finally:
        torch.cuda.synchronize()
    return {name: tensor.cpu() for name, tensor in outputs.items() if tensor is not None}


@pytest.mark.parametrize("channels", [70, 264])
@pytest.mark.parametrize("use_silu", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
def test_dtypes_and_widths(dtype, width, use_silu, channels):
    assert_right(replace(make_pack(LENGTHS, width=width, dtype=dtype, channels=channels), use_silu=use_silu))


@pytest.mark.parametrize("narrow_state", [False, True])
@pytest.mark.parametrize("narrow_weight", [False, True])
@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
def test_parameters_and_states_are_narrow_or_fp32(dtype, narrow_weight, narrow_state):
    parameter_dtype, state_dtype = (dtype if narrow else torch.float32 for narrow in (narrow_weight, narrow_state))
    found = assert_right(
        make_pack(LENGTHS, channels=72, dtype=dtype, parameter_dtype=parameter_dtype, state_dtype=state_dtype)
    )
    assert (found["dweight"].dtype, found["dinitial_state"].dtype) == (parameter_dtype, state_dtype)


@pytest.mark.parametrize("absent", [("bias",), ("initial_state",), ("bias", "initial_state", "dfinal_state")])
def test_absent_inputs(absent):
    assert_right(replace(make_pack(LENGTHS, channels=72, dtype=torch.bfloat16), **dict.fromkeys(absent)))


@pytest.mark.parametrize("channels", [1, 8, 70, 512, 1032])
@pytest.mark.parametrize("tokens", [*range(1, 6), 15, 16, 17, 18, 19, 63, 64, 65, 127, 128, 129])
def test_token_and_channel_counts(tokens, channels):
    """Tiles have 16 tokens here: one, several, and a last one that ends at, before and after their boundary."""
    assert_right(make_pack((tokens,), channels=channels, dtype=torch.bfloat16))


@pytest.mark.parametrize("width", [2, 3, 4])
def test_short_documents_at_every_place_of_a_tile(width):
    lengths = [3, 0, 1, 2, 1, 0, 0, 4, 1, 1, 2, 5] * 12
    for shift in range(4):
        assert_right(make_pack((shift, *lengths), channels=8, width=width, dtype=torch.float16))


def test_2048_short_documents():
    lengths = torch.randint(0, 9, (2048,), generator=torch.Generator().manual_seed(1)).tolist()
    assert_right(make_pack(lengths, channels=16, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
def test_final_state_is_the_last_tokens_to_the_bit(dtype):
    pack = make_pack(LENGTHS, channels=72, dtype=dtype)
    found = run(pack)["final_state"]
    for n, document in enumerate(pack.x.split(LENGTHS)):
        extended = torch.cat([pack.initial_state[n].T, document])
        assert torch.equal(found[n], extended[len(document) :].T)


def test_neighbours_change_no_bit():
    lengths = (45, 1, 100, 2)
    pack = make_pack(lengths, channels=72, dtype=torch.bfloat16)
    found = run(pack)
    for n, x in enumerate(pack.x.split(lengths)):
        rows = slice(int(pack.cu_seqlens[n]), int(pack.cu_seqlens[n + 1]))
        one = slice(n, n + 1)
        states = {name: getattr(pack, name)[one].contiguous() for name in ("initial_state", "dfinal_state")}
        alone = run(replace(pack, x=x, dy=pack.dy[rows], cu_seqlens=torch.tensor([0, len(x)]), **states))
        for name, part in (("y", rows), ("dx", rows), ("final_state", one), ("dinitial_state", one)):
            assert torch.equal(alone[name], found[name][part]), name


def test_strided_inputs():
    pack = make_pack(LENGTHS, channels=72, dtype=torch.bfloat16)
    expected = run(pack)
    tokens, channels = pack.x.shape
    columns = replace(pack, x=pack.x.T.contiguous().T, dy=pack.dy.T.contiguous().T)
    wide = torch.full((tokens, 2, 3 * channels), float("nan"), dtype=torch.bfloat16)
    slices = replace(pack, x=wide[:, 0, ::3].copy_(pack.x), dy=wide[:, 1, 2::3].copy_(pack.dy))
    shared = torch.full((tokens, 3 * channels), float("nan"), dtype=torch.bfloat16)
    parts = [shared[:, part * channels : (part + 1) * channels] for part in (0, 2)]
    neighbours = replace(pack, x=parts[0].copy_(pack.x), dy=parts[1].copy_(pack.dy))  # whole aligned rows
    odd = torch.empty(2 * tokens * channels + 1, dtype=torch.bfloat16)[1:].view(2, tokens, channels)
    misaligned = replace(pack, x=odd[0].copy_(pack.x), dy=odd[1].copy_(pack.dy))
    for strided in (columns, slices, neighbours, misaligned):
        assert_equal_bits(run(strided), expected)
    one_for_all = torch.ones((), dtype=torch.bfloat16).expand(pack.dy.shape)
    assert_equal_bits(run(replace(pack, dy=one_for_all)), run(replace(pack, dy=one_for_all.contiguous())))


def test_same_bits_every_time():
    pack = make_pack((3000, 1, 2999), channels=520, dtype=torch.bfloat16)
    found = run(pack)
    for _ in range(20):
        assert_equal_bits(run(pack), found)


def test_sums_over_many_tokens():
    """fp32 sums of 60,000 terms of size 1, cut into tiles: within 2e-6 of their root sum of squares."""
    pack = make_pack((20_000, 1, 39_999), channels=3, dtype=torch.bfloat16, parameter_dtype=torch.float32)
    found, expected = run(pack), reference(pack)
    for name in ("dweight", "dbias"):
        assert (found[name].double() - expected[name]).abs().max() < 2e-6 * 60_000**0.5, name


@pytest.mark.parametrize("channels", [7, 8])
@pytest.mark.parametrize("tile", [1, 2, 3, 20, 1000])
def test_tile_sizes_change_only_the_order_of_sums(tile, channels):
    pack = make_pack((0, 5, 0, 0, 33, 2, 1, 0), channels=channels, dtype=torch.bfloat16)
    expected = reference(pack)
    for program in ("conv_forward", "conv_backward"):
        workspace = torch.full((41 * 5 * channels,), float("nan"), device="cuda")
        changes = {"tile_tokens": tile}
        if program == "conv_backward":
            changes |= {"workspace": workspace.data_ptr(), "workspace_bytes": workspace.nbytes}
        found = launch_on_device(program, pack, **changes)
        assert_near(found, expected, pack, DEVICE_ERROR)


@pytest.mark.parametrize("spare_rows", [0, 40])
@pytest.mark.parametrize("channels", [(8, 1032), (1024, 512, 2056), (70, 1, 264)])
@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
def test_a_launch_of_several_has_the_bits_of_a_launch_for_each(dtype, channels, spare_rows):
    """Also where they have tiles of different lengths, and where one of them makes all read number by number."""
    packs = [make_pack((1100, 0, 2, 2000), channels=count, dtype=dtype, seed=count) for count in channels]
    assert run_together(packs, spare_rows, "cuda") == [["conv_forward"], ["conv_backward"]]


@pytest.mark.parametrize("channels", [7, 8])
def test_rows_behind_the_pack_are_neither_used_nor_written(channels):
    pack = make_pack((40, 0, 24, 0), channels=channels, dtype=torch.bfloat16)
    behind = torch.full((70, channels), float("nan"), dtype=torch.bfloat16)
    longer = replace(pack, x=torch.cat([pack.x, behind]), dy=torch.cat([pack.dy, behind]))
    for program, name in (("conv_forward", "y"), ("conv_backward", "dx")):
        expected, found = launch_on_device(program, pack), launch_on_device(program, longer)
        assert found[name][64:].isnan().all()
        found[name] = found[name][:64]
        assert_near({n: found[n] for n in found if n in ("dweight", "dbias")}, expected, pack, DEVICE_ERROR)
        for same in found.keys() - {"dweight", "dbias"}:
            assert torch.equal(found[same], expected[same]), same


def test_without_tokens():
    pack = make_pack((0, 0), channels=12, dtype=torch.float16)
    nothing = {"x": None, "y": None}
    found = launch_on_device("conv_forward", pack, **nothing)
    assert torch.equal(found["final_state"], pack.initial_state)
    found = launch_on_device("conv_backward", pack, x=None, dy=None, dx=None)
    assert torch.equal(found["dinitial_state"], pack.dfinal_state)
    assert not found["dweight"].any() and not found["dbias"].any()


def test_many_empty_documents():
    lengths = (*[0] * 3000, 3, *[0] * 3000, 64, *[0] * 3000)
    pack = make_pack(lengths, channels=8, dtype=torch.bfloat16)
    found = run(pack)
    empty = torch.tensor(lengths) == 0
    assert torch.equal(found["final_state"][empty], pack.initial_state[empty])
    assert torch.equal(found["dinitial_state"][empty], pack.dfinal_state[empty])
    assert not any(tensor.isnan().any() for tensor in found.values())


def test_silu_far_from_zero():
    """SiLU is x on the right and 0 on the left; NaN, last so that no other tap meets it, stays."""
    x = torch.tensor([-3e38, -1e4, -100.0, -88.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 100.0, 3e38, float("nan")])
    x = x.bfloat16()[:, None].contiguous()
    pack = make_pack((len(x),), channels=1, width=2, dtype=torch.bfloat16, parameter_dtype=torch.float32)
    pack = replace(pack, x=x, dy=torch.ones_like(x), weight=torch.tensor([[0.0, 1.0]]))
    pack = replace(pack, bias=None, initial_state=None, dfinal_state=None)
    found = run(pack)
    inputs = x[:-1].double().requires_grad_()
    expected = torch.nn.functional.silu(inputs)
    expected.sum().backward()
    torch.testing.assert_close(found["y"][:-1].double(), expected.detach(), rtol=2.0**-8, atol=1e-30)
    torch.testing.assert_close(found["dx"][:-2].double(), inputs.grad[:-1], rtol=2.0**-8, atol=1e-30)
    assert found["y"][-1].isnan() and found["dx"][-1].isnan()


def test_more_elements_than_32_bits_count():
    tokens, channels = 2**18 + 40, 2**13  # 2^31 elements of 4 GiB, and some
    if torch.cuda.get_device_properties(0).total_memory < 48 << 30:
        pytest.skip("needs 48 GiB of device memory")
    x = torch.randn(tokens, channels, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(channels, 4, device="cuda", dtype=torch.bfloat16)
    results = []
    for rows in (x, x[-40:]):
        leaf = rows[None].detach().requires_grad_()
        y, _ = causal_conv1d(leaf, weight)
        y.backward(torch.ones((), dtype=x.dtype, device="cuda").expand(y.shape))
        results.append((y[0, -30:].detach().clone(), leaf.grad[0, -30:].clone()))
    for whole, part in zip(*results):
        assert torch.equal(whole, part)


BAD = {
    "no channels": ({"num_channels": 0}, "num_channels is 0"),
    "negative documents": ({"num_documents": -1}, "num_documents is -1"),
    "negative tokens": ({"num_tokens": -1}, "num_tokens is -1"),
    "no tile": ({"tile_tokens": 0}, "tile_tokens is 0"),
    "narrow": ({"width": 1}, "width is 1"),
    "wide": ({"width": 5}, "width is 5"),
    "weight dtype": ({"weight_dtype": 1}, "weight_dtype is 1"),
    "state dtype": ({"state_dtype": 3}, "state_dtype 3"),
    "no x": ({"x": None}, "x is null"),
    "no weight": ({"weight": None}, "weight is null"),
    "no boundaries": ({"cu_seqlens": None}, "cu_seqlens is null"),
}
BAD_FORWARD = BAD | {"no y": ({"y": None}, "y is null")}
BAD_BACKWARD = BAD | {
    "no dy": ({"dy": None}, "dy is null"),
    "no dx": ({"dx": None}, "dx is null"),
    "no dweight": ({"dweight": None}, "dweight is null"),
    "no workspace": ({"workspace": None}, "workspace is"),
    "small workspace": ({"workspace_bytes": 5 * 5 * 70 * 4 - 1}, "workspace_bytes is 6999; 5 tiles of 70 channels"),
}


@pytest.mark.parametrize(
    ("program", "case"),
    [("conv_forward", case) for case in BAD_FORWARD] + [("conv_backward", case) for case in BAD_BACKWARD],
)
def test_bad_arguments_are_refused(program, case):
    changes, message = (BAD_FORWARD if program == "conv_forward" else BAD_BACKWARD)[case]
    with pytest.raises(UnsupportedProblemError, match=message):
        launch_on_device(program, make_pack((65,), dtype=torch.bfloat16), **changes)
