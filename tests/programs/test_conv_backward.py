"""conv_backward (cpu) against FP64 autograd: dtypes, widths, short and empty documents, strides, fixed sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cake_kda_jit.errors import UnsupportedProblemError
from cake_kda_jit.programs.conv_backward import workspace_bytes
from cake_kda_jit.programs.conv_forward import tile_tokens

from .convolutions import (
    DTYPES,
    assert_equal_bits,
    assert_near,
    backward_values,
    launch,
    make_pack,
    reference,
    run_backward,
)


@pytest.mark.parametrize("use_silu", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_dtypes_and_widths(dtype, width, use_silu):
    pack = replace(make_pack(width=width, dtype=dtype), use_silu=use_silu)
    found = run_backward(pack)
    assert found.keys() == {"dx", "dweight", "dbias", "dinitial_state"}
    assert_near(found, reference(pack), pack)


@pytest.mark.parametrize("channels", [1, 128, 129, 300])
def test_channel_counts(channels):
    pack = make_pack(channels=channels)
    assert_near(run_backward(pack), reference(pack), pack)


@pytest.mark.parametrize("parameter_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("state_dtype", DTYPES.values(), ids=DTYPES)
def test_parameters_and_states_have_dtypes_of_their_own(parameter_dtype, state_dtype):
    pack = make_pack(dtype=torch.bfloat16, parameter_dtype=parameter_dtype, state_dtype=state_dtype)
    found = run_backward(pack)
    assert found["dweight"].dtype == parameter_dtype and found["dinitial_state"].dtype == state_dtype
    assert_near(found, reference(pack), pack)


@pytest.mark.parametrize(
    "absent", [("bias",), ("initial_state",), ("dfinal_state",), ("bias", "initial_state", "dfinal_state")]
)
def test_absent_inputs(absent):
    pack = replace(make_pack(), **dict.fromkeys(absent))
    found = run_backward(pack)
    assert ("dbias" in found) == ("bias" not in absent)
    assert_near(found, reference(pack), pack)


def test_optional_outputs():
    pack = make_pack()
    values, outputs = backward_values(pack)
    launch("conv_backward", torch.float32, values | {"dbias": None, "dinitial_state": None})
    full = run_backward(pack)
    for name in ("dx", "dweight"):
        assert torch.equal(outputs[name], full[name])


def test_empty_document_passes_the_state_gradient_through():
    pack = make_pack((0, 5, 0))
    found = run_backward(pack)["dinitial_state"]
    assert torch.equal(found[[0, 2]], pack.dfinal_state[[0, 2]])


def test_sums_over_many_tokens():
    """Two levels of sums: 3,000 fp32 terms of size 1 stay within 2e-6 of their root sum of squares."""
    pack = make_pack((1000, 1, 1999), channels=3)
    found, expected = run_backward(pack), reference(pack)
    for name in ("dweight", "dbias"):
        assert (found[name].double() - expected[name]).abs().max() < 2e-6 * 3000**0.5, name


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_strided_inputs(dtype):
    pack = make_pack(dtype=dtype)
    expected = run_backward(pack)
    columns = replace(pack, x=pack.x.T.contiguous().T, dy=pack.dy.T.contiguous().T)
    wide = torch.full((pack.x.shape[0], 2, 3 * pack.x.shape[1]), float("nan"), dtype=dtype)
    slices = replace(pack, x=wide[:, 0, ::3].copy_(pack.x), dy=wide[:, 1, 2::3].copy_(pack.dy))
    one_for_all = torch.ones((), dtype=dtype).expand(pack.dy.shape)
    for strided in (columns, slices):
        assert_equal_bits(run_backward(strided), expected)
    assert_equal_bits(
        run_backward(replace(pack, dy=one_for_all)), run_backward(replace(pack, dy=one_for_all.contiguous()))
    )


def test_thread_count_changes_no_bit():
    pack = make_pack((700, 3, 0, 1), channels=300)
    expected = run_backward(pack, num_threads=1)
    for num_threads in (2, 7):
        assert_equal_bits(run_backward(pack, num_threads=num_threads), expected)


def test_without_tokens():
    pack = make_pack((0, 0))
    values, outputs = backward_values(pack)
    launch("conv_backward", torch.float32, values | {"x": None, "dy": None, "dx": None})
    assert torch.equal(outputs["dinitial_state"], pack.dfinal_state)
    assert not outputs["dweight"].any() and not outputs["dbias"].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_channels": 0}, "num_channels is 0"),
        ({"width": 5}, "width is 5"),
        ({"num_threads": -2}, "num_threads is -2"),
        ({"x": None}, "x is null"),
        ({"dy": None}, "dy is null"),
        ({"dx": None}, "dx is null"),
        ({"dweight": None}, "dweight is null"),
        ({"weight": None}, "weight is null"),
    ],
)
def test_refuses(changes, message):
    pack = make_pack()
    values, outputs = backward_values(pack)
    with pytest.raises(UnsupportedProblemError, match=message):
        launch("conv_backward", torch.float32, values | changes)
    assert outputs["dx"].isnan().all() and outputs["dweight"].isnan().all()


@pytest.mark.parametrize(
    ("tokens", "channels", "tile"),
    [(0, 1, 16), (1, 1, 16), (4096, 1024, 16), (4097, 2048, 32), (8192, 4096, 128), (131072, 12288, 512)],
)
def test_tiles_of_the_cuda_families(tokens, channels, tile):
    """As many tokens as leave 256 CTAs of 1,024 channels; a tile has a row of the workspace per tap, and dbias one."""
    assert tile_tokens(tokens, channels) == tile
    for width in (2, 4):
        assert workspace_bytes(tokens, channels, width) == max(1, -(-tokens // tile)) * (width + 1) * channels * 4
