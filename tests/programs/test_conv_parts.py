"""Several convolutions in one launch: the bits of a launch for each, and which of them a launch takes together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cake_kda_jit.errors import UnsupportedProblemError
from cake_kda_jit.ops.conv import ConvInputs, conv_backward_together

from .convolutions import DTYPES, forward_values, launch_parts, make_pack, run_together

pytestmark = pytest.mark.usefixtures("nan_poison")

TOGETHER = [["conv_forward"], ["conv_backward"]]


def make_packs(channels, **options):
    return [make_pack(channels=count, seed=seed, **options) for seed, count in enumerate(channels)]


@pytest.mark.parametrize("spare_rows", [0, 9])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("channels", [(5,), (130, 7), (64, 300, 1)])
def test_bits_of_a_launch_for_each(channels, width, spare_rows):
    assert run_together(make_packs(channels, width=width), spare_rows) == TOGETHER


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype(dtype):
    assert run_together(make_packs((8, 140, 8), dtype=dtype, parameter_dtype=torch.float32)) == TOGETHER


def test_another_width_or_dtype_of_weights_is_a_launch_of_its_own():
    alone = [["conv_forward"] * 3, ["conv_backward"] * 3]
    packs = make_packs((8, 16, 8), dtype=torch.bfloat16)
    assert run_together(packs) == TOGETHER
    for other in ({"parameter_dtype": torch.float32}, {"width": 3}):
        assert run_together([*packs[:2], make_pack(channels=8, dtype=torch.bfloat16, **other)]) == alone


def test_states_that_some_lack_and_states_of_another_dtype():
    packs = make_packs((8, 130, 5), dtype=torch.bfloat16, state_dtype=torch.float32)
    assert run_together(packs) == TOGETHER
    assert run_together([replace(packs[0], dfinal_state=None), replace(packs[1], bias=None), packs[2]]) == TOGETHER
    # A launch has one dtype of states, which is that of x where there are none.
    alone = [["conv_forward"], ["conv_backward"] * 3]
    assert run_together([*packs[:2], replace(packs[2], initial_state=None, dfinal_state=None)]) == alone
    packs = make_packs((8, 130, 5), dtype=torch.bfloat16)
    assert run_together([*packs[:2], replace(packs[2], initial_state=None)]) == TOGETHER
    assert run_together([replace(one, initial_state=None, dfinal_state=None) for one in packs]) == TOGETHER


def test_without_tokens_states_pass_through():
    packs = make_packs((8, 5), lengths=(0, 0))
    inputs = [ConvInputs(one.x, one.weight, one.bias, one.initial_state, one.cu_seqlens, False, True) for one in packs]
    dys, dfinal_states = [one.dy for one in packs], [packs[0].dfinal_state, None]
    for found, expected, one in zip(conv_backward_together(inputs, dys, dfinal_states), dfinal_states, packs):
        dx, dweight, dbias, dinitial_state = found
        assert dx.shape == one.x.shape and not dweight.any() and not dbias.any()
        assert torch.equal(dinitial_state, torch.zeros_like(one.initial_state) if expected is None else expected)


@pytest.mark.parametrize("name", ["x", "weight", "y"])
def test_what_a_later_part_lacks_is_refused(name):
    packs = make_packs((8, 8, 8))
    given = [forward_values(pack) for pack in packs]
    values = [values for values, _ in given]
    values[2][name] = None
    with pytest.raises(UnsupportedProblemError, match=f"{name} is null"):
        launch_parts("conv_forward", torch.float32, values)
