"""grad_scan: the reverse scan against FP64 on the same tiles, the replay against chunk_scan's own bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cake_kda_jit.errors import UnsupportedProblemError

from .gradients import run_grad_scan, run_scan
from .pipeline import (
    CHUNK,
    FP32_TOLERANCE,
    Pack,
    assert_equal_bits,
    assert_near,
    exact_beta,
    launch,
    make_pack,
    make_tables,
    record_of,
    run_prepare,
    table_values,
    whole_gradients,
)

LENGTHS = (100, 0, 64, 1, 200)
SEGMENT = 2 * CHUNK


def normal(*shape, seed=5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def states(pack: Pack, rows: int, seed=5) -> Tensor:
    return normal(rows, pack.HV, pack.K, pack.K, seed=seed)


def is_first(segments, index: int) -> bool:
    return index == 0 or segments[index - 1][0] != segments[index][0]


def is_last(segments, index: int) -> bool:
    return index + 1 == len(segments) or segments[index + 1][0] != segments[index][0]


def exact_reverse(pack: Pack, tiles, dfinal_state, segment_dexit) -> dict[str, Tensor]:
    """FP64 on the given tiles."""
    tiles = {name: tile.double() for name, tile in tiles.items()}
    beta = exact_beta(pack).T.unsqueeze(-1)
    chunks, segments = pack.tables.chunks(), pack.tables.segments()
    found = {
        "dS": torch.zeros(pack.HV, len(chunks), pack.K, pack.K, dtype=torch.float64),
        "z": torch.zeros(pack.HV, len(chunks), CHUNK, pack.K, dtype=torch.float64),
        "dinitial_state": torch.zeros(len(pack.lengths), pack.HV, pack.K, pack.K, dtype=torch.float64),
    }
    for index, (document, first_chunk, count, summary_row) in enumerate(segments):
        dS = (dfinal_state[document] if is_last(segments, index) else segment_dexit[summary_row]).double()
        for n in reversed(range(first_chunk, first_chunk + count)):
            _, token, rows, _ = chunks[n]
            ke, qg, kg = (tiles[name][:, n, :rows] for name in ("ke", "qg", "kg"))
            Aqk, Tinv = (tiles[name][:, n, :rows, :rows] for name in ("Aqk", "Tinv"))
            do = pack.do[token : token + rows].double().transpose(0, 1)
            z = Tinv.mT @ (Aqk.mT @ do + kg @ dS)
            found["dS"][:, n], found["z"][:, n, :rows] = dS.mT, z
            dv = beta[:, token : token + rows] * z
            dS = tiles["decay_total"][:, n].unsqueeze(-1) * dS + qg.mT @ do - ke.mT @ dv
        if is_first(segments, index):
            found["dinitial_state"][document] = dS
    return found


def assert_exact(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The whole of z and its rounded part; 2^-16 of it is lost in a bf16 tile."""
    assert_near("z", found["z"][:, :, :CHUNK], expected["z"])
    assert_near("z", whole_gradients(found["z"]), expected["z"], 2.0**-16 + FP32_TOLERANCE)
    for name in ("dS", "dinitial_state"):
        assert_near(name, found[name], expected[name])


@pytest.mark.parametrize(("variant", "segment"), [("fp32_k64", 0), ("fp32_k64", SEGMENT), ("bf16_k64", SEGMENT)])
def test_reverse_scan(variant, segment):
    pack = make_pack(LENGTHS, variant, H=1, HV=2, beta_form="sigmoid").cut(segment)
    tiles = run_prepare(pack)
    dfinal_state = states(pack, len(LENGTHS))
    segment_dexit = states(pack, int(pack.tables.summary_offsets[-1]) + 1, seed=6)
    found = run_grad_scan(pack, tiles, dfinal_state=dfinal_state, segment_dexit=segment_dexit)
    expected = exact_reverse(pack, tiles, dfinal_state, segment_dexit)
    assert_exact(found, expected)
    whole = whole_gradients(found["z"])
    for n, (_, _, rows, _) in enumerate(pack.tables.chunks()):
        assert not whole[:, n, rows:].any(), "rows past a chunk's end are 0"


def test_reverse_scan_k128():
    pack = make_pack((70, 20), "bf16_k128", H=1, HV=1, gate_form="bounded", l2norm=True)
    tiles, dfinal_state = run_prepare(pack), normal(2, 1, 128, 128)
    found = run_grad_scan(pack, tiles, dfinal_state=dfinal_state)
    assert_exact(found, exact_reverse(pack, tiles, dfinal_state, None))


def test_without_final_gradient_it_starts_from_zeros():
    pack = make_pack((70, 0))
    tiles, zeros = run_prepare(pack), torch.zeros(2, 2, 64, 64)
    found = run_grad_scan(pack, tiles)
    assert_equal_bits(found, run_grad_scan(pack, tiles, dfinal_state=zeros))
    assert not found["dS"][:, 1].any() and not found["dinitial_state"][1].any()


@pytest.mark.parametrize("lengths", [(0,), (0, 0), (0, 65, 0)])
def test_empty_documents_pass_their_gradient(lengths):
    pack = make_pack(lengths)
    dfinal_state = states(pack, len(lengths))
    found = run_grad_scan(pack, run_prepare(pack), dfinal_state=dfinal_state)["dinitial_state"]
    assert torch.isfinite(found).all()
    for document, length in enumerate(lengths):
        assert torch.equal(found[document], dfinal_state[document]) == (length == 0)


def test_hard_resets():
    pack = make_pack((150,), gate_form="ready")
    pack.g[[0, 70, 149]] = -torch.inf
    pack.g[100, :, ::2] = -torch.inf
    tiles, dfinal_state = run_prepare(pack), states(pack, 1)
    found = run_grad_scan(pack, tiles, dfinal_state=dfinal_state)
    for name, tensor in exact_reverse(pack, tiles, dfinal_state, None).items():
        assert_near(name, found[name], tensor)
    assert not found["dinitial_state"].any(), "nothing passes a reset of every channel"


@pytest.mark.parametrize("variant", ["fp32_k64", "bf16_k64"])
@pytest.mark.parametrize("interval", [1, 2, 3, 100])
def test_replay_gives_the_scan_bits(variant, interval):
    pack = make_pack((330, 0, 70, 1), variant, H=1, HV=2).cut(3 * CHUNK)
    tiles = run_prepare(pack)
    entry = states(pack, int(pack.tables.summary_offsets[-1]))
    scanned = run_scan(pack, tiles, checkpoint_chunks=interval, segment_entry=entry)
    given = {"segment_dexit": entry, "checkpoints": scanned["checkpoints"], "checkpoint_chunks": interval}
    found = run_grad_scan(pack, tiles, **given)
    assert_equal_bits({name: found[name] for name in ("h", "v_new")}, {n: scanned[n] for n in ("h", "v_new")})
    alone = run_grad_scan(pack, tiles, segment_dexit=entry)
    assert_equal_bits({name: found[name] for name in alone}, alone)


def checkpointed(pack: Pack, tiles) -> dict[str, object]:
    checkpoints = run_scan(pack, tiles, checkpoint_chunks=2)["checkpoints"]
    return {"checkpoints": checkpoints, "checkpoint_chunks": 2, "dfinal_state": states(pack, len(pack.lengths))}


def test_head_blocks_and_threads_change_no_bit():
    pack = make_pack((130, 40), H=2, HV=4)
    tiles = run_prepare(pack)
    given = checkpointed(pack, tiles)
    whole = run_grad_scan(pack, tiles, num_threads=1, **given)
    assert_equal_bits(run_grad_scan(pack, tiles, num_threads=5, **given), whole)
    for first in (0, 2):
        block = slice(first, first + 2)
        found = run_grad_scan(pack, {n: tile[block] for n, tile in tiles.items()}, heads=(first, 2), **given)
        dinitial_state = found.pop("dinitial_state")
        assert_equal_bits(found, {name: whole[name][block] for name in found})
        assert torch.equal(dinitial_state[:, block], whole["dinitial_state"][:, block])
        assert dinitial_state.isnan().sum() == dinitial_state.numel() / 2, "the other heads are left alone"


def test_neighbours_change_no_bit():
    pack = make_pack((70, 90, 30))
    dfinal_state = states(pack, 3)
    found = run_grad_scan(pack, run_prepare(pack), dfinal_state=dfinal_state)
    rows, inputs = slice(70, 160), ("q", "k", "v", "g", "beta", "do")
    alone = replace(pack, lengths=(90,), tables=make_tables((90,)), **{n: getattr(pack, n)[rows] for n in inputs})
    expected = run_grad_scan(alone, run_prepare(alone), dfinal_state=dfinal_state[1:2])
    chunks = slice(2, 4)
    assert torch.equal(found["dinitial_state"][1], expected["dinitial_state"][0])
    assert all(torch.equal(found[name][:, chunks], expected[name]) for name in ("dS", "z"))


def test_rows_of_the_tables_that_are_not_in_use():
    pack = make_pack((130, 40))
    values, tables = table_values((130, 40), max_chunks=7, max_segments=5)
    spare = replace(pack, tables=tables)
    launch(record_of("pack_tables", "int64"), values)
    tiles = run_prepare(spare)
    found = run_grad_scan(spare, tiles, **checkpointed(spare, tiles))
    tiles = run_prepare(pack)
    expected = run_grad_scan(pack, tiles, **checkpointed(pack, tiles))
    assert torch.equal(found.pop("dinitial_state"), expected.pop("dinitial_state"))
    assert_equal_bits({name: tensor[:, :4] for name, tensor in found.items()}, expected)
    assert all(tensor[:, 4:].isnan().all() for tensor in found.values())


REFUSALS = [
    ({"num_heads": 0}, "num_heads is 0"),
    ({"num_heads": 3}, "multiple of num_heads, which is 3"),
    ({"num_block_heads": 1}, "whole groups of 2"),
    ({"num_threads": 0}, "num_threads is 0"),
    ({"ke": None}, "ke is null"),
    ({"dS": None}, "dS is null"),
    ({"beta_dtype": 7}, "beta_dtype is 7"),
    ({"segment_dexit": None}, "segment_dexit is null"),
    ({"checkpoint_chunks": 0}, "checkpoint_chunks is 0"),
    ({"h": None}, "h is null"),
    ({"v": None}, "v is null"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSALS)
def test_refusals(changed, message):
    pack = make_pack((130,), H=1, HV=2).cut(CHUNK)
    rows = states(pack, 3)
    given = {"segment_dexit": rows, "checkpoints": rows, "checkpoint_chunks": 1}
    with pytest.raises(UnsupportedProblemError, match=message):
        run_grad_scan(pack, run_prepare(pack), **(given | changed))
