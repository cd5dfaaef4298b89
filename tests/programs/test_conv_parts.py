"""Several convolutions in one launch: the bits of a launch for each, and which of them a launch takes together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cake_kda_jit.errors import UnsupportedProblemError

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
    assert run_together([*packs[:2], replace(packs[2], weight=packs[2].weight.float())]) == alone
    assert run_together([*packs[:2], replace(packs[2], weight=packs[2].weight[:, :3].contiguous())]) == alone


@pytest.mark.parametrize("name", ["x", "weight", "y"])
def test_what_a_later_part_lacks_is_refused(name):
    packs = make_packs((8, 8, 8))
    given = [forward_values(pack) for pack in packs]
    values = [values for values, _ in given]
    values[2][name] = None
    with pytest.raises(UnsupportedProblemError, match=f"{name} is null"):
        launch_parts("conv_forward", torch.float32, values)
