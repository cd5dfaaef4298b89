"""gated_norm_backward (cpu): its sum over rows, and what is refused. Values stand in the forward's tests."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit.errors import UnsupportedProblemError
from cake_kda_jit.programs.gated_norm_backward import tile_rows, workspace_bytes

from .norms import assert_near, backward_values, launch, make_case, reference, run
from .test_gated_norm_forward import BAD, BAD_THREADS


@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
def test_tiles_change_only_the_order_of_sums(rows):
    case = make_case()
    values, outputs = backward_values(case, rows)
    launch("gated_norm_backward", case, values)
    for name, expected in run(case).items():
        if name in ("dx", "dgate"):
            assert torch.equal(outputs[name], expected), name
    assert not outputs.pop("workspace").isnan().any()
    assert_near(outputs, reference(case), case)


def test_sums_over_many_rows():
    """Sums in double of products that fp32 rounds: 60,000 of size 1 stay within 5e-7 of their root sum of squares."""
    case = make_case(20_000, 3, dtype=torch.bfloat16, weight_dtype=torch.float32)
    error = (run(case)["dweight"].double() - reference(case)["dweight"]).abs().max()
    assert error < 5e-7 * 60_000**0.5


def test_without_tokens():
    case = make_case(0)
    values, outputs = backward_values(case)
    nothing = dict.fromkeys(("x", "gate", "dy", "dx", "dgate", "workspace"))
    launch("gated_norm_backward", case, values | nothing)
    assert not outputs["dweight"].any()


BAD_BACKWARD = BAD | {
    "no tile": ({"tile_rows": 0}, "tile_rows is 0"),
    "no dy": ({"dy": None}, "dy is null"),
    "no dx": ({"dx": None}, "dx is null"),
    "no dgate": ({"dgate": None}, "dgate is null"),
    "no dweight": ({"dweight": None}, "dweight is null"),
    "no workspace": ({"workspace": None}, "workspace is null"),
    "small workspace": ({"workspace_bytes": 511}, "workspace_bytes is 511; 2 tiles of 64 channels need 512"),
}


@pytest.mark.parametrize(("changes", "message"), (BAD_BACKWARD | BAD_THREADS).values(), ids=BAD_BACKWARD | BAD_THREADS)
def test_refuses(changes, message):
    case = make_case()
    values, outputs = backward_values(case)
    with pytest.raises(UnsupportedProblemError, match=message):
        launch("gated_norm_backward", case, values | changes)
    assert all(out.isnan().all() for out in outputs.values())


@pytest.mark.parametrize(
    ("rows", "tile"), [(0, 64), (1, 64), (32_768, 64), (65_408, 64), (65_409, 128), (131_072, 256), (2**31 - 1, 256)]
)
def test_tiles(rows, tile):
    """As many rows as leave 512 tiles, between 64 and 256; each tile has a row of the workspace."""
    assert tile_rows(rows) == tile
    assert workspace_bytes(rows, 128) == max(1, -(-rows // tile)) * 128 * 4
