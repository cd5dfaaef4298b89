"""chunk_prepare (cpu) against FP64 tiles: every input form, edges of documents and numbers, blocks, absent outputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cake_kda_jit.errors import UnsupportedProblemError

from .pipeline import (
    BAD_BLOCKS,
    BEHIND,
    FUSED,
    TILE_NAMES,
    Pack,
    assert_equal_bits,
    assert_near,
    block_values,
    edited,
    exact_chunk,
    gate_values,
    launch,
    make_pack,
    make_tables,
    make_tiles,
    record_of,
    run_prepare,
)

EDGES = (0, 1, 63, 64, 65, 0, 130)


def assert_exact_tiles(pack: Pack, tiles) -> None:
    for chunk, (_, _, rows, _) in enumerate(pack.tables.chunks()):
        exact = exact_chunk(pack, chunk)
        for name, tile in tiles.items():
            found, expected = tile[:, chunk], getattr(exact, name)
            if name != "decay_total":
                assert not found[:, rows:].any(), f"{name}: rows past the chunk's end are 0"
                found = found[:, :rows]
            if name in ("Aqk", "Tinv"):
                assert not found.triu(1).any(), f"{name}: its upper part is 0"
                found = found[:, :, :rows]
            assert_near(f"{name} of chunk {chunk}", found, expected)


@pytest.mark.parametrize("variant", ["fp32_k64", "bf16_k64", "bf16_k128"])
def test_tiles_of_every_chunk(variant):
    pack = make_pack(EDGES, variant, **FUSED)
    assert_exact_tiles(pack, run_prepare(pack))


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("beta_form", ["ready", "sigmoid", "two_sigmoid"])
@pytest.mark.parametrize("gate_form", ["ready", "softplus", "bounded"])
def test_every_input_form(gate_form, beta_form, l2norm):
    pack = make_pack((70, 3), gate_form=gate_form, beta_form=beta_form, l2norm=l2norm, seed=1)
    assert_exact_tiles(pack, run_prepare(pack))


@pytest.mark.parametrize("absent", [("A_log",), ("dt_bias",), ("A_log", "dt_bias")])
def test_bounded_gate_without_parameters(absent):
    pack = make_pack((66,), gate_form="bounded", **dict.fromkeys(absent))
    assert_exact_tiles(pack, run_prepare(pack))


@pytest.mark.parametrize("g_dtype", [torch.float32, torch.float16])
def test_gate_and_beta_of_another_dtype(g_dtype):
    pack = make_pack((66,), "bf16_k64", g_dtype=g_dtype, **FUSED)
    assert_exact_tiles(pack, run_prepare(pack))


def test_strided_inputs():
    pack = make_pack((67,), H=2, HV=4)
    strided = {name: torch.stack([getattr(pack, name)] * 2, dim=-1)[..., 0] for name in ("q", "k", "g", "beta")}
    assert_equal_bits(run_prepare(replace(pack, **strided)), run_prepare(pack))


def test_hard_resets_give_exact_zeros():
    """g = -inf at row 30 of a short chunk: no row reaches across it, and nothing is NaN."""
    pack = make_pack((50,), gate_form="ready")
    pack.g[30] = -torch.inf
    tiles = run_prepare(pack)
    assert_exact_tiles(pack, tiles)
    assert not tiles["decay_total"].any()
    for name in ("ke", "qg"):
        assert not tiles[name][:, 0, 30:].any()
    assert not tiles["kg"][:, 0, :30].any()
    for name in ("Aqk", "Tinv"):
        assert not tiles[name][:, 0, 30:, :30].any()


def test_gates_that_underflow():
    """Decays of e^-30 and e^-100 a token: their products leave fp32's range, their quotients would be NaN."""
    pack = make_pack((64,), gate_form="ready")
    pack.g[:] = -30.0
    pack.g[::3] = -100.0
    assert_exact_tiles(pack, run_prepare(pack))


def test_correlated_keys():
    """Keys of cosine 0.9 written with beta 0.95: a truncated series for Tinv would be wrong by a third."""
    pack = make_pack((64,), gate_form="ready", HV=1, beta_form="ready")
    pack.k.copy_(torch.nn.functional.normalize(3.0 * torch.ones(64) / 8.0 + pack.k, dim=-1))
    pack.g[:] = -1e-3
    pack.beta[:] = 0.95
    k = exact_chunk(pack, 0).k[0]
    assert (k @ k.T).mean() > 0.85
    assert_exact_tiles(pack, run_prepare(pack))


def test_a_later_gate_does_not_touch_an_earlier_row():
    pack = make_pack((64,), **FUSED)
    changed = replace(pack, g=pack.g.clone())
    changed.g[40:] += 3.0
    tiles, others = run_prepare(pack), run_prepare(changed)
    for name in ("ke", "qg", "Aqk", "Tinv"):
        assert torch.equal(tiles[name][:, :, :40], others[name][:, :, :40]), name
        assert not torch.equal(tiles[name], others[name]), name


@pytest.mark.parametrize("wanted", [(name,) for name in TILE_NAMES] + [("Aqk", "ke"), ("Tinv", "kg"), ()])
def test_absent_outputs_change_no_bit_of_the_others(wanted):
    pack = make_pack((70,), **FUSED)
    absent = {name: None for name in TILE_NAMES if name not in wanted}
    everything = run_prepare(pack)
    assert_equal_bits(run_prepare(pack, **absent), {name: everything[name] for name in wanted})


def test_without_queries():
    pack = make_pack((70,), **FUSED)
    everything = run_prepare(pack)
    found = run_prepare(pack, q=None, qg=None, Aqk=None)
    assert_equal_bits(found, {name: everything[name] for name in ("ke", "kg", "Tinv", "decay_total")})


@pytest.mark.parametrize("heads", [(0, 2), (2, 2), (2, 4)])
def test_a_head_block_has_the_bits_of_the_whole(heads):
    first, count = heads
    pack = make_pack((70, 5), H=3, HV=6, **FUSED)
    whole = run_prepare(pack)
    assert_exact_tiles(pack, whole)
    assert_equal_bits(run_prepare(pack, heads), {name: tile[first : first + count] for name, tile in whole.items()})


def test_bits_do_not_depend_on_threads_or_neighbours():
    pack = make_pack((40, 70, 9), **FUSED)
    tiles = run_prepare(pack)
    for num_threads in (1, 3, 16):
        assert_equal_bits(run_prepare(pack, num_threads=num_threads), tiles)
    rows = slice(40, 110)
    alone = replace(
        pack, **{name: getattr(pack, name)[rows] for name in ("q", "k", "g", "beta")}, tables=make_tables((70,))
    )
    assert_equal_bits(run_prepare(alone), {name: tile[:, 1:3].contiguous() for name, tile in tiles.items()})


def test_rows_without_a_document_are_left_alone():
    pack = make_pack((70,), **FUSED)
    tables = replace(pack.tables, chunk_table=edited(pack.tables.chunk_table, 1, 0, -1))
    tiles = run_prepare(replace(pack, tables=tables))
    assert_equal_bits(
        {name: tile[:, 0].contiguous() for name, tile in tiles.items()},
        {name: tile[:, 0].contiguous() for name, tile in run_prepare(pack).items()},
    )
    assert all(tile[:, 1].isnan().all() for tile in tiles.values())


def test_a_pack_without_chunks():
    pack = make_pack((0, 0))
    assert all(tile.numel() == 0 for tile in run_prepare(pack, k=None, q=None, qg=None, Aqk=None).values())


BAD = BAD_BLOCKS | {
    "no keys": ({"k": None}, "k is null"),
    "no gate": ({"g": None}, "g is null"),
    "no queries": ({"q": None}, "q is null, but qg is wanted"),
    "g dtype": ({"g_dtype": 7}, "g_dtype is 7"),
    "gate form": ({"gate_form": 3}, "gate_form is 3"),
    "no A_log": ({"gate_form": 1, "A_log": None}, "A_log is null; the softplus gate"),
    "bound": ({"lower_bound": -6.0}, "lower_bound is -6"),
    "ready": ({"ready": torch.zeros(10, dtype=torch.int32)}, "ready is given; only the sm90 family"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused(case):
    change, message = BAD[case]
    pack = make_pack((70,), H=2, HV=4, **FUSED)
    tables = {"chunk_table": pack.tables.chunk_table, "num_chunks": 2}
    values = block_values(pack, None) | gate_values(pack) | BEHIND | tables | make_tiles(pack, 4)
    with pytest.raises(UnsupportedProblemError, match=message):
        launch(record_of("chunk_prepare", pack.variant), values | change)


@pytest.mark.parametrize(("column", "value"), [(0, -2), (1, -1), (2, 65), (2, 0)])
def test_a_table_that_pack_tables_does_not_write_is_refused(column, value):
    pack = make_pack((70,))
    tables = replace(pack.tables, chunk_table=edited(pack.tables.chunk_table, 1, column, value))
    with pytest.raises(UnsupportedProblemError, match=r"chunk_table\[1\] is document"):
        run_prepare(replace(pack, tables=tables))
