"""grad_scan on a CUDA device: against its cpu twin, FP64 and chunk_scan's own bits, outputs poisoned with NaN."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from cake_kda_jit.errors import UnsupportedProblemError

from ..programs.gradients import do_values
from ..programs.pipeline import (
    CHUNK,
    FUSED,
    Pack,
    assert_equal_bits,
    assert_near,
    edited,
    exact_beta,
    make_pack,
    poisoned,
    record_of,
    run_prepare,
    scan_values,
    table_values,
    whole_gradients,
)
from ..programs.pipeline import launch as launch_on_host
from ..programs.test_chunk_scan import scan_outputs
from ..programs.test_grad_scan import is_first, is_last, states
from .twins import (
    BAD_SCANS,
    VARIANTS,
    assert_close,
    bits,
    device_has,
    document_of,
    launch_on_device,
    launch_twin,
    launcher_fixture,
    make_weak_pack,
)

pytestmark = pytest.mark.gpu

EDGES = (0, 1, 63, 64, 65, 0, 200)
SEGMENTED = (0, 300, 64, 0, 130)
REPLAYED = ("h", "v_new")

# beta z, and an fp16 do, are rounded to bf16 as factors, 2^-9, which the twin does not do. Weak gates keep what a step
# lost: that adds up over a few chunks, and tiles of dS then fall to the other side of a tie.
TWIN_TOLERANCE = 4e-3


def run_grad_scan(pack: Pack, tiles, *, launcher, heads=None, dfinal_state="random", **given):
    """Every output of one launch, h and v_new where checkpoints are given; those set to None are left out."""
    num_heads, chunks, K = (heads or (0, pack.HV))[1], pack.tables.num_chunks, pack.K
    outputs = {name: poisoned(num_heads, chunks, K, K, dtype=torch.bfloat16) for name in ("dS", "h")}
    outputs["z"] = poisoned(*pack.gradient_tile(num_heads), dtype=torch.bfloat16)
    outputs["v_new"] = poisoned(*pack.value_tile(num_heads), dtype=torch.bfloat16)
    outputs["dinitial_state"] = poisoned(len(pack.lengths), pack.HV, K, K)
    if dfinal_state == "random":
        dfinal_state = states(pack, len(pack.lengths))
    absent = dict.fromkeys(("checkpoints", "segment_dexit", "ready")) | {"checkpoint_chunks": 1}
    values = absent | scan_values(pack, tiles, heads) | do_values(pack) | outputs
    values |= {"dfinal_state": dfinal_state} | given
    launcher("grad_scan", pack.variant, values, outputs)
    unused = () if values["checkpoints"] is not None else REPLAYED
    assert all(outputs[name].isnan().all() for name in unused), "without checkpoints nothing is replayed"
    return {name: tensor for name, tensor in outputs.items() if values[name] is not None and name not in unused}


launcher = launcher_fixture("grad_scan")


@pytest.fixture
def run(launcher):
    return partial(run_grad_scan, launcher=launcher)


def run_scan(pack: Pack, tiles, *, launcher=launch_on_device, **given):
    """All that chunk_scan keeps: h, v_new and checkpoints."""
    outputs = scan_outputs(pack, pack.HV, given.get("checkpoint_chunks", 1))
    edges = dict.fromkeys(("segment_entry", "ready")) | {"initial_state": pack.initial_state}
    values = scan_values(pack, tiles) | edges | outputs
    launcher("chunk_scan", pack.variant, values | {"checkpoint_chunks": 1} | given, outputs)
    return outputs


def assert_like_twin(pack: Pack, tiles, found, **options) -> None:
    expected = run_grad_scan(pack, tiles, launcher=launch_twin, **options)
    assert found.keys() == expected.keys()
    found, expected = (tensors | {"z": whole_gradients(tensors["z"])} for tensors in (found, expected))
    for name, tensor in found.items():
        assert_close(name, tensor, expected[name], TWIN_TOLERANCE)


def assert_exact_steps(pack: Pack, tiles, found, segment_dexit=None) -> None:
    """Each chunk in FP64 from the stored z, of which the kernel rounds beta z: the rest is exact."""
    tiles = {name: tile.double() for name, tile in tiles.items()}
    beta, do = exact_beta(pack).T.unsqueeze(-1), pack.do.bfloat16().double().transpose(0, 1)
    dfinal_state = states(pack, len(pack.lengths)).double()
    chunks, segments = pack.tables.chunks(), pack.tables.segments()
    whole = whole_gradients(found["z"])
    expected = {"dS": torch.full_like(found["dS"], float("nan"), dtype=torch.float64)}
    expected["dinitial_state"] = torch.zeros_like(dfinal_state)
    for index, (document, first_chunk, num_chunks, summary_row) in enumerate(segments):
        dS = dfinal_state[document] if is_last(segments, index) else segment_dexit[summary_row].double()
        for chunk in reversed(range(first_chunk, first_chunk + num_chunks)):
            _, token, count, _ = chunks[chunk]
            rows = slice(token, token + count)
            ke, qg, kg = (tiles[name][:, chunk, :count] for name in ("ke", "qg", "kg"))
            Aqk, Tinv = (tiles[name][:, chunk, :count, :count] for name in ("Aqk", "Tinv"))
            z = whole[:, chunk, :count]
            expected["dS"][:, chunk] = dS.mT
            # dS, dv' and the stored z lose 2^-17 each; tensor cores truncate sums of fp32, and dS is off as below.
            assert_close("z", z, Tinv.mT @ (Aqk.mT @ do[:, rows] + kg @ dS), 1e-4)
            assert_near("the rounded z", found["z"][:, chunk, :count], z, 1e-6)
            assert not whole[:, chunk, count:].any(), "rows past the chunk's end are 0"
            weighed = (beta[:, rows] * z).bfloat16().double()
            dS = tiles["decay_total"][:, chunk].unsqueeze(-1) * dS + qg.mT @ do[:, rows] - ke.mT @ weighed
        if is_first(segments, index):
            expected["dinitial_state"][document] = dS
    for name in ("dS", "dinitial_state"):
        # The kernel rounds beta z of a z with all its bits: one in 256 falls to the other side of a tie here, and is
        # then a unit of 2^-8 off in one of the 64 terms of a sum. Weak gates keep several of them. Tensor cores
        # truncate fp32 sums, which is far less.
        assert_near(name, found[name], expected[name], 4e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_output(run, variant):
    pack = make_pack(EDGES, variant, H=1, HV=3, **FUSED)
    tiles = run_prepare(pack)
    found = run(pack, tiles)
    assert_like_twin(pack, tiles, found)
    assert_exact_steps(pack, tiles, found)


def test_long_weak_gates(run):
    pack = make_weak_pack((1500, 300), strength=0.01)
    tiles = run_prepare(pack)
    found = run(pack, tiles)
    assert_like_twin(pack, tiles, found)
    assert_exact_steps(pack, tiles, found)


def test_hard_resets(run):
    pack = make_pack((150, 40), "bf16_k128", gate_form="ready")
    pack.g[[30, 64, 149, 150]] = -torch.inf
    pack.g[100, :, ::2] = -torch.inf
    tiles = run_prepare(pack)
    found = run(pack, tiles)
    assert_exact_steps(pack, tiles, found)
    assert not found["dinitial_state"][1].any(), "nothing passes a reset of every channel"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("interval", [1, 2, 3, 100])
def test_segments_and_the_bits_of_the_replay(run, variant, interval):
    pack = make_pack(SEGMENTED, variant, **FUSED).cut(3 * CHUNK)
    tiles = run_prepare(pack)
    entry = states(pack, int(pack.tables.summary_offsets[-1]), seed=7)
    kept = run_scan(pack, tiles, segment_entry=entry, checkpoint_chunks=interval)
    found = run(pack, tiles, segment_dexit=entry, checkpoints=kept["checkpoints"], checkpoint_chunks=interval)
    assert_equal_bits({name: found[name] for name in REPLAYED}, {name: kept[name] for name in REPLAYED})
    assert_exact_steps(pack, tiles, found, entry)
    alone = run(pack, tiles, segment_dexit=entry)
    assert_equal_bits({name: found[name] for name in alone}, alone)
    assert_like_twin(pack, tiles, alone, segment_dexit=entry)
    assert torch.equal(found["dinitial_state"][[0, 3]], states(pack, len(SEGMENTED))[[0, 3]])


def test_many_segments_find_their_checkpoints(run):
    """Rows of checkpoints are found by a search that divides the segments by 32."""
    lengths = tuple((37 * n) % 200 for n in range(1200))
    pack = make_pack(lengths, "bf16_k64", HV=1, **FUSED)
    tiles = run_prepare(pack)
    kept = run_scan(pack, tiles, checkpoint_chunks=2)
    found = run(pack, tiles, checkpoints=kept["checkpoints"], checkpoint_chunks=2)
    assert_equal_bits({name: found[name] for name in REPLAYED}, {name: kept[name] for name in REPLAYED})


def test_without_final_gradient_it_starts_from_zeros(run):
    pack = make_pack((70, 0), "bf16_k128", **FUSED)
    tiles = run_prepare(pack)
    found = run(pack, tiles, dfinal_state=None)
    assert_equal_bits(found, run(pack, tiles, dfinal_state=torch.zeros(2, 2, 128, 128)))
    assert not found["dS"][:, 1].any() and not found["dinitial_state"][1].any()


@pytest.mark.parametrize("lengths", [(0,), (0, 0), (0, 65, 0)])
def test_empty_documents_pass_their_gradient(run, lengths):
    pack = make_pack(lengths, "bf16_k64", **FUSED)
    found = run(pack, run_prepare(pack))["dinitial_state"]
    for document, length in enumerate(lengths):
        assert torch.equal(found[document], states(pack, len(lengths))[document]) == (length == 0)


def test_poisoned_rows_and_strides(run):
    """NaN behind the pack and between elements, spare rows of the tables and odd addresses change nothing."""
    pack = make_pack((70, 5), "bf16_k128", **FUSED)
    tiles = run_prepare(pack)
    checkpoints = run_scan(pack, tiles)["checkpoints"]
    expected = run(pack, tiles, checkpoints=checkpoints)
    values, tables = table_values((70, 5), max_chunks=3, max_segments=4)
    launch_on_host(record_of("pack_tables", "int64"), values)
    nans = torch.full((90, pack.HV, 128, 2), float("nan"), dtype=torch.bfloat16)
    nans[:75, ..., 0], nans[:75, ..., 1] = pack.v, pack.do
    beta = torch.full((90, pack.HV + 1), float("nan"), dtype=torch.bfloat16)
    beta[:75, 1:] = pack.beta
    hidden = replace(pack, v=nans[..., 0], do=nans[..., 1], beta=beta[:, 1:], tables=tables)
    checkpoints = torch.cat([checkpoints, poisoned(2, *checkpoints.shape[1:])])
    assert_equal_bits(run(hidden, tiles, checkpoints=checkpoints), expected)
    odd = torch.empty(pack.do.numel() + 1, dtype=torch.bfloat16)[1:].view(pack.do.shape).copy_(pack.do)
    assert_equal_bits(run(replace(pack, do=odd), tiles), run(pack, tiles))


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1, 2)])
def test_expanded_gradients(run, dims):
    """do of stride 0, as a sum's or a mean's backward gives it."""
    pack = make_pack((70, 5), "bf16_k128", **FUSED)
    tiles = run_prepare(pack)
    shape = tuple(1 if dim in dims else size for dim, size in enumerate(pack.do.shape))
    narrow = torch.randn(shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    expanded = narrow.expand(pack.do.shape)
    assert all(expanded.stride(dim) == 0 for dim in dims)
    found = run(replace(pack, do=expanded), tiles)
    assert_equal_bits(found, run(replace(pack, do=expanded.contiguous()), tiles))


@pytest.mark.parametrize("heads", [(0, 2), (2, 4)])
def test_a_head_block_has_the_bits_of_the_whole(run, heads):
    first, count = heads
    inside = torch.zeros(6, dtype=torch.bool)
    inside[first : first + count] = True
    pack = make_pack((150, 5), "bf16_k128", H=3, HV=6, **FUSED)
    tiles = run_prepare(pack)
    given = {"checkpoints": run_scan(pack, tiles)["checkpoints"]}
    whole = run(pack, tiles, **given)
    found = run(pack, {name: tile[inside].contiguous() for name, tile in tiles.items()}, heads=heads, **given)
    whole_state, found_state = whole.pop("dinitial_state"), found.pop("dinitial_state")
    assert_equal_bits(found, {name: tensor[inside].contiguous() for name, tensor in whole.items()})
    assert torch.equal(found_state[:, inside], whole_state[:, inside])
    assert found_state[:, ~inside].isnan().all(), "other heads are left alone"


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_bits_every_time(run, variant):
    pack = make_pack((700, 70, 300), variant, H=2, HV=4, **FUSED)
    tiles = run_prepare(pack)
    given = {"checkpoints": run_scan(pack, tiles, checkpoint_chunks=2)["checkpoints"], "checkpoint_chunks": 2}
    found = run(pack, tiles, **given)
    for _ in range(10):
        assert_equal_bits(run(pack, tiles, **given), found)


@pytest.mark.skipif(not torch.cuda.is_available() or not device_has("sm90"), reason="needs two families")
@pytest.mark.parametrize("lengths", [EDGES, SEGMENTED, (700, 0, 130), tuple(range(1, 80))])
@pytest.mark.parametrize("variant", VARIANTS)
def test_families_agree_in_every_bit(variant, lengths):
    """What a replay forms again is what chunk_scan had, whatever the family; what runs backwards agrees as well."""
    pack = make_weak_pack(lengths, variant, strength=0.05, H=1, HV=2).cut(3 * CHUNK)
    tiles = run_prepare(pack)
    entry = states(pack, int(pack.tables.summary_offsets[-1]), seed=7)
    kept = run_scan(pack, tiles, segment_entry=entry, checkpoint_chunks=2)
    given = {"segment_dexit": entry, "checkpoints": kept["checkpoints"], "checkpoint_chunks": 2}
    found, expected = (
        run_grad_scan(pack, tiles, launcher=partial(launch_on_device, family=family), **given)
        for family in ("sm90", "smxx")
    )
    assert_equal_bits(found, expected)
    assert_equal_bits({name: found[name] for name in REPLAYED}, {name: kept[name] for name in REPLAYED})


def test_neighbours_change_no_bit(run):
    pack = make_pack((40, 170, 9), "bf16_k128", **FUSED)
    dfinal_state = states(pack, 3)
    found = run(pack, run_prepare(pack))
    alone = document_of(pack, 1)
    own = run(alone, run_prepare(alone), dfinal_state=dfinal_state[1:2].contiguous())
    assert torch.equal(own["dinitial_state"][0], found["dinitial_state"][1])
    for name in ("dS", "z"):
        assert torch.equal(bits(own[name]), bits(found[name][:, 1:4])), name


def test_the_number_of_ctas_changes_no_bit(run):
    """Many documents leave no processor to themselves, one alone gets deeper stages."""
    pack = make_pack((70, *range(1, 80)), "bf16_k128", HV=1, **FUSED)
    dfinal_state = states(pack, 80)
    # Nothing is cut and no segment_dexit read; that there is one lets sm90 take segments for alike, and wide CTAs.
    found = run(pack, run_prepare(pack), segment_dexit=dfinal_state)
    for document in (0, 1, 66):
        alone = document_of(pack, document)
        own = run(alone, run_prepare(alone), dfinal_state=dfinal_state[document : document + 1].contiguous())
        assert torch.equal(own["dinitial_state"][0], found["dinitial_state"][document])


def test_D_of_a_summary_has_the_bits_of_a_scan_from_zero(launcher):
    pack = make_weak_pack((300, 64, 130), strength=0.02).cut(128, summarize_all=1)
    tiles = run_prepare(pack)
    rows = int(pack.tables.summary_offsets[-1])
    D = poisoned(rows, pack.HV, 128, 128)
    options = {"M": None, "B": D, "backward": 1, "skip_first_M": 0, "skip_first_B": 0, "skip_last_B": 0}
    launch_on_device("segment_summary", pack.variant, scan_values(pack, tiles) | do_values(pack) | options, {"B": D})
    as_documents = pack.tables.segment_table.clone()
    as_documents[:, 0] = torch.arange(rows)
    cut = replace(pack, tables=replace(pack.tables, segment_table=as_documents))
    dinitial_state = poisoned(rows, pack.HV, 128, 128)
    nothing = dict.fromkeys(("checkpoints", "segment_dexit", "dfinal_state", "h", "v_new", "ready")) | {
        "checkpoint_chunks": 1
    }
    values = scan_values(cut, tiles) | do_values(cut) | nothing | {"dinitial_state": dinitial_state}
    values["dS"] = poisoned(pack.HV, pack.tables.num_chunks, 128, 128, dtype=torch.bfloat16)
    values["z"] = poisoned(*pack.gradient_tile(pack.HV), dtype=torch.bfloat16)
    launcher("grad_scan", pack.variant, values, {"dinitial_state": dinitial_state})
    assert torch.equal(D, dinitial_state)


def test_absent_tensors_change_no_bit(run):
    """Without a replay nothing reads v; without dinitial_state nothing else changes."""
    pack = make_pack((130, 5), "bf16_k128", **FUSED)
    tiles = run_prepare(pack)
    everything = run(pack, tiles)
    found = run(pack, tiles, dinitial_state=None, v=None, h=None, v_new=None)
    assert_equal_bits(found, {name: everything[name] for name in ("dS", "z")})


def test_more_segments_than_a_grid_has_rows(launcher):
    """grid.y and grid.z stop at 65,535; all documents but two are empty."""
    pack = make_pack((3, *[0] * 70_000, 4), "bf16_k64", HV=1, **FUSED, initial_state=None)
    nothing = dict.fromkeys(("dfinal_state", "segment_dexit", "dinitial_state", "checkpoints", "h", "v_new", "ready"))
    values = scan_values(pack, run_prepare(pack)) | do_values(pack) | nothing | {"checkpoint_chunks": 0}
    shapes = {"dS": (1, 2, 64, 64), "z": pack.gradient_tile(1)}
    found, expected = ({n: poisoned(*shape, dtype=torch.bfloat16) for n, shape in shapes.items()} for _ in range(2))
    launcher("grad_scan", pack.variant, values | found, found)
    launch_twin("grad_scan", pack.variant, values | expected, {})
    assert_close("dS", found["dS"], expected["dS"], TWIN_TOLERANCE)
    assert_close("z", *(whole_gradients(tensors["z"]) for tensors in (found, expected)), TWIN_TOLERANCE)


BAD = BAD_SCANS | {
    "no gradient": ({"do_": None}, "do_ is null"),
    "no dS": ({"dS": None}, "dS is null"),
    "no z": ({"z": None}, "z is null"),
    "no h": ({"h": None}, "h is null"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused(run, case):
    change, message = BAD[case]
    pack = make_pack((70,), "bf16_k64", H=2, HV=4, **FUSED)
    with pytest.raises(UnsupportedProblemError, match=message):
        run(pack, run_prepare(pack), **{"checkpoints": states(pack, 3)} | change)


def test_a_row_without_a_document_writes_nothing(run):
    pack = make_pack((70,), "bf16_k64", **FUSED)
    tables = replace(pack.tables, segment_table=edited(pack.tables.segment_table, 0, 0, -1))
    found = run(replace(pack, tables=tables), run_prepare(pack), checkpoints=states(pack, 3))
    assert all(tensor.isnan().all() for tensor in found.values())
