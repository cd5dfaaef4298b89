"""conv_forward (cpu) against FP64: dtypes, widths, short and empty documents, strides, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cake_kda_jit.errors import UnsupportedProblemError

from .convolutions import (
    DTYPES,
    LENGTHS,
    assert_equal_bits,
    assert_near,
    forward_values,
    launch,
    make_pack,
    reference,
    run_forward,
)


@pytest.mark.parametrize("use_silu", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_dtypes_and_widths(dtype, width, use_silu):
    pack = replace(make_pack(width=width, dtype=dtype), use_silu=use_silu)
    assert_near(run_forward(pack), reference(pack), pack)


@pytest.mark.parametrize("channels", [1, 128, 129, 300])
def test_channel_counts(channels):
    pack = make_pack(channels=channels)
    assert_near(run_forward(pack), reference(pack), pack)


@pytest.mark.parametrize("parameter_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("state_dtype", DTYPES.values(), ids=DTYPES)
def test_parameters_and_states_have_dtypes_of_their_own(parameter_dtype, state_dtype):
    pack = make_pack(dtype=torch.bfloat16, parameter_dtype=parameter_dtype, state_dtype=state_dtype)
    found = run_forward(pack)
    assert found["final_state"].dtype == state_dtype
    assert_near(found, reference(pack), pack)


@pytest.mark.parametrize("absent", [("bias",), ("initial_state",), ("bias", "initial_state", "dfinal_state")])
def test_absent_inputs(absent):
    pack = replace(make_pack(), **dict.fromkeys(absent))
    assert_near(run_forward(pack), reference(pack), pack)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_final_state_is_the_last_tokens_to_the_bit(dtype, width):
    pack = make_pack(width=width, dtype=dtype)
    found = run_forward(pack)["final_state"]
    for n, document in enumerate(pack.x.split(LENGTHS)):
        extended = torch.cat([pack.initial_state[n].T, document])
        assert torch.equal(found[n], extended[len(document) :].T)


def test_documents_never_mix():
    pack = make_pack((3, 1, 40))
    found = run_forward(pack)["y"].split((3, 1, 40))
    for n, x in enumerate(pack.x.split((3, 1, 40))):
        alone = replace(
            pack,
            x=x,
            initial_state=pack.initial_state[n : n + 1].contiguous(),
            dfinal_state=pack.dfinal_state[n : n + 1],
            cu_seqlens=torch.tensor([0, len(x)]),
        )
        assert torch.equal(run_forward(alone)["y"], found[n])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_strided_x(dtype):
    pack = make_pack(dtype=dtype)
    expected = run_forward(pack)
    columns = pack.x.T.contiguous().T
    slices = torch.full((pack.x.shape[0], 3 * pack.x.shape[1]), float("nan"), dtype=dtype)[:, 1::3]
    slices.copy_(pack.x)
    for x in (columns, slices):
        assert not x.is_contiguous()
        assert_equal_bits(run_forward(replace(pack, x=x)), expected)


def test_thread_count_changes_no_bit():
    pack = make_pack(channels=300)
    expected = run_forward(pack, num_threads=1)
    for num_threads in (2, 7):
        assert_equal_bits(run_forward(pack, num_threads=num_threads), expected)


def test_silu_far_from_zero():
    """SiLU is x on the right and 0 on the left, to the ends of fp32; NaN, last so that no other tap meets it, stays."""
    x = torch.tensor([-3e38, -1e4, -100.0, -88.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 100.0, 3e38, float("nan")])
    tokens = len(x)
    pack = replace(
        make_pack((tokens,), channels=1, width=2),
        x=x[:, None].contiguous(),
        weight=torch.tensor([[0.0, 1.0]]),
        bias=None,
        initial_state=None,
        dfinal_state=None,
    )
    y = run_forward(pack)["y"][:, 0]
    expected = torch.nn.functional.silu(x.double())
    torch.testing.assert_close(y[:-1].double(), expected[:-1], rtol=1e-6, atol=1e-30)
    assert y[-1].isnan()


def test_without_tokens():
    pack = make_pack((0, 0))
    values, outputs = forward_values(pack)
    launch("conv_forward", torch.float32, values | {"x": None, "y": None})
    assert torch.equal(outputs["final_state"], pack.initial_state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_channels": 0}, "num_channels is 0"),
        ({"num_documents": -1}, "num_documents is -1"),
        ({"width": 1}, "width is 1"),
        ({"width": 5}, "width is 5"),
        ({"weight_dtype": 3}, "weight_dtype is 3"),
        ({"state_dtype": -1}, "state_dtype -1"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"x": None}, "x is null"),
        ({"y": None}, "y is null"),
        ({"weight": None}, "weight is null"),
        ({"cu_seqlens": None}, "cu_seqlens is null"),
    ],
)
def test_refuses(changes, message):
    pack = make_pack()
    values, outputs = forward_values(pack)
    with pytest.raises(UnsupportedProblemError, match=message):
        launch("conv_forward", torch.float32, values | changes)
    assert outputs["y"].isnan().all() and outputs["final_state"].isnan().all()


def test_refuses_decreasing_boundaries():
    pack = replace(make_pack((4, 2)), cu_seqlens=torch.tensor([0, 6, 4]))
    values, _ = forward_values(pack)
    with pytest.raises(UnsupportedProblemError, match=r"cu_seqlens\[1\.\.\] is 6, 4"):
        launch("conv_forward", torch.float32, values)
