"""chunk_scan on a CUDA device: against its cpu twin and FP64 on the same tiles, outputs poisoned with NaN."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from cake_kda_jit.errors import UnsupportedProblemError
from cake_kda_jit.reference import transfer_walk_reference

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
    run_prepare,
    run_summary,
    scan_values,
    whole_values,
)
from ..programs.test_chunk_scan import scan_outputs
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

# S is rounded to bf16 as a factor, which the twin does not do: a unit of 2^-9 in v' and in o, and o is then rounded by
# both. A tile of h falls to the other side of a tie where S differs by what weak gates keep of many chunks.
TWIN_TOLERANCE = 4e-3


def run_scan(pack: Pack, tiles, *, launcher, heads=None, checkpoint_chunks=2, segment_entry=None, **given):
    """Every output of one launch; those that ``given`` sets to None are left out."""
    outputs = scan_outputs(pack, (heads or (0, pack.HV))[1], max(checkpoint_chunks, 1))
    states = {"initial_state": pack.initial_state, "segment_entry": segment_entry, "ready": None}
    values = scan_values(pack, tiles, heads) | outputs | states | {"checkpoint_chunks": checkpoint_chunks} | given
    launcher("chunk_scan", pack.variant, values, outputs)
    return {name: tensor for name, tensor in outputs.items() if values[name] is not None}


launcher = launcher_fixture("chunk_scan")


@pytest.fixture
def run(launcher):
    return partial(run_scan, launcher=launcher)


def by_head(name: str, tensor):
    return tensor.transpose(0, 1) if name == "o" else tensor


def assert_like_twin(pack: Pack, tiles, found, **options) -> None:
    expected = run_scan(pack, tiles, launcher=launch_twin, **options)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert_close(name, by_head(name, tensor), by_head(name, expected[name]), TWIN_TOLERANCE)


def assert_exact_steps(pack: Pack, tiles, found, segment_entry=None) -> None:
    """Each chunk in FP64 from the stored h and both parts of v': so the kernel rounds them, and o and S are exact."""
    tiles = {name: tile.double() for name, tile in tiles.items()}
    h, stored = found["h"].double(), whole_values(found["v_new"])
    v, beta = pack.v.double().transpose(0, 1), exact_beta(pack).T.unsqueeze(-1)
    chunks, segments = pack.tables.chunks(), pack.tables.segments()
    expected = {
        name: torch.full_like(found[name], float("nan"), dtype=torch.float64) for name in ("o", "final_state", "h")
    }
    for index, (document, first_chunk, num_chunks, summary_row) in enumerate(segments):
        S = torch.zeros(pack.HV, pack.K, pack.K, dtype=torch.float64)
        if index and segments[index - 1][0] == document:
            S = segment_entry[summary_row].double()
        elif pack.initial_state is not None:
            S = pack.initial_state[document].double()
        for chunk in range(first_chunk, first_chunk + num_chunks):
            _, token, count, _ = chunks[chunk]
            rows = slice(token, token + count)
            ke, qg, kg = (tiles[name][:, chunk, :count] for name in ("ke", "qg", "kg"))
            Aqk, Tinv = (tiles[name][:, chunk, :count, :count] for name in ("Aqk", "Tinv"))
            factor, v_new = h[:, chunk].mT, stored[:, chunk, :count]
            expected["h"][:, chunk] = S.mT
            expected["o"][rows] = (qg @ factor + Aqk @ v_new).transpose(0, 1)
            # beta x and v' lose 2^-17 each in two parts; tensor cores truncate sums of fp32.
            assert_close("v_new", v_new, Tinv @ (beta[:, rows] * (v[:, rows] - ke @ factor)), 5e-5)
            high, low = found["v_new"][:, chunk].split(CHUNK, dim=1)
            assert_near("the first part of v'", high[:, :count], v_new, 1e-6)
            assert not high[:, count:].any() and not low[:, count:].any(), "rows past the chunk's end are 0"
            S = tiles["decay_total"][:, chunk].unsqueeze(-1) * S + kg.mT @ v_new
        expected["final_state"][document] = S
    for name, tensor in expected.items():
        assert_near(name, found[name], tensor, 2e-5)  # fp32 sums that tensor cores truncate


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
    tiles = run_prepare(pack)
    found = run(pack, tiles)
    assert_exact_steps(pack, tiles, found)
    without = run(replace(pack, initial_state=None), tiles)
    assert torch.equal(without["o"][30:], found["o"][30:]), "nothing crosses a reset"


@pytest.mark.parametrize("checkpoint_chunks", [1, 3])
def test_segments_and_checkpoints(run, checkpoint_chunks):
    pack = make_pack((0, 300, 64, 0, 130), "bf16_k128", **FUSED).cut(128)
    tiles = run_prepare(pack)
    entry = torch.randn(int(pack.tables.summary_offsets[-1]), pack.HV, 128, 128)
    options = {"segment_entry": entry, "checkpoint_chunks": checkpoint_chunks}
    found = run(pack, tiles, **options)
    assert_like_twin(pack, tiles, found, **options)
    assert_exact_steps(pack, tiles, found, entry)
    if checkpoint_chunks == 1:
        for index, (_, first_chunk, num_chunks, _) in enumerate(pack.tables.segments()):
            states = found["checkpoints"][first_chunk + index : first_chunk + index + num_chunks].transpose(0, 1)
            assert torch.equal(states.bfloat16(), found["h"][:, first_chunk : first_chunk + num_chunks])
    assert torch.equal(found["final_state"][[0, 3]], pack.initial_state[[0, 3]])


def test_segments_give_what_one_segment_gives(run):
    pack = make_weak_pack((300, 0, 64, 200, 30), strength=0.05)
    tiles = run_prepare(pack)
    cut = pack.cut(128, minimum=100)
    entry, _ = transfer_walk_reference(*run_summary(cut, tiles), pack.initial_state, cut.tables.summary_offsets)
    whole, found = run(pack, tiles), run(cut, tiles, segment_entry=entry.float())
    for name in ("o", "final_state", "h", "v_new"):
        assert_close(name, found[name], whole[name], 2 * TWIN_TOLERANCE)


def test_poisoned_rows_and_strided_values(run):
    """NaN behind the pack and between v's elements, and spare rows of the tables, change nothing."""
    pack = make_pack((70, 5), "bf16_k128", **FUSED)
    tiles = run_prepare(pack)
    expected = run(pack, tiles, checkpoints=None)
    spare = torch.tensor([[-1, 0, 0, -1]], dtype=torch.int32)
    tables = replace(pack.tables, segment_table=torch.cat([pack.tables.segment_table, spare]))
    nans = torch.full((90, pack.HV, 128, 2), float("nan"), dtype=torch.bfloat16)
    nans[:75, ..., 0] = pack.v
    beta = torch.full((90, pack.HV + 1), float("nan"), dtype=torch.bfloat16)
    beta[:75, 1:] = pack.beta
    hidden = replace(pack, v=nans[..., 0], beta=beta[:, 1:], tables=tables)
    found = run(hidden, tiles, checkpoints=None)
    assert found["o"][75:].isnan().all(), "rows behind the pack are left alone"
    assert_equal_bits(found | {"o": found["o"][:75]}, expected)
    odd = torch.empty(pack.v.numel() + 1, dtype=torch.bfloat16)[1:].view(pack.v.shape).copy_(pack.v)
    misaligned = run(replace(pack, v=odd), tiles, checkpoints=None)
    assert torch.equal(bits(misaligned["o"]), bits(expected["o"]))


@pytest.mark.skipif(not torch.cuda.is_available() or not device_has("sm90"), reason="needs two families")
@pytest.mark.parametrize("lengths", [EDGES, (700, 0, 130), tuple(range(1, 80))])
@pytest.mark.parametrize("variant", VARIANTS)
def test_families_agree_in_every_bit(variant, lengths):
    """A forward by one family may be replayed by another: what grad_scan forms again is what chunk_scan had."""
    pack = make_weak_pack(lengths, variant, strength=0.05, H=1, HV=2)
    tiles = run_prepare(pack)
    found, expected = (
        run_scan(pack, tiles, launcher=partial(launch_on_device, family=family)) for family in ("sm90", "smxx")
    )
    assert_equal_bits(found, expected)


@pytest.mark.parametrize("heads", [(0, 2), (2, 4)])
def test_a_head_block_has_the_bits_of_the_whole(run, heads):
    first, count = heads
    inside = torch.zeros(6, dtype=torch.bool)
    inside[first : first + count] = True
    pack = make_pack((70, 5), "bf16_k128", H=3, HV=6, **FUSED)
    whole = run(pack, run_prepare(pack))
    found = run(pack, run_prepare(pack, heads), heads=heads)
    for name, tensor in whole.items():
        if name in ("h", "v_new"):
            assert torch.equal(bits(found[name]), bits(tensor[inside])), name
        else:
            assert torch.equal(bits(found[name][:, inside]), bits(tensor[:, inside])), name
            assert found[name][:, ~inside].isnan().all(), f"{name}: other heads are left alone"


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_bits_every_time(run, variant):
    pack = make_pack((700, 70, 300), variant, H=2, HV=4, **FUSED)
    tiles = run_prepare(pack)
    found = run(pack, tiles)
    for _ in range(10):
        assert_equal_bits(run(pack, tiles), found)


def test_neighbours_change_no_bit(run):
    pack = make_pack((40, 170, 9), "bf16_k128", **FUSED)
    found = run(pack, run_prepare(pack))
    alone = document_of(pack, 1)
    own = run(alone, run_prepare(alone))
    assert torch.equal(own["o"], found["o"][40:210])
    assert torch.equal(own["final_state"][0], found["final_state"][1])
    assert torch.equal(own["h"], found["h"][:, 1:4]) and torch.equal(own["v_new"], found["v_new"][:, 1:4])


def test_the_width_of_a_cta_changes_no_bit(run):
    """Many heads of one document get wide CTAs, few of them narrow ones."""
    pack = make_pack((200,), "bf16_k128", H=70, HV=70, **FUSED)
    tiles = run_prepare(pack)
    found, bare = run(pack, tiles), run(pack, tiles, h=None, v_new=None)
    assert_like_twin(pack, tiles, found)
    assert_exact_steps(pack, tiles, found)
    for first in (0, 68):
        inside = slice(first, first + 2)
        own = run(pack, run_prepare(pack, (first, 2)), heads=(first, 2))
        for name in ("o", "final_state", "checkpoints"):
            for wide in (found, bare):
                assert torch.equal(bits(own[name][:, inside]), bits(wide[name][:, inside])), name
        for name in ("h", "v_new"):
            assert torch.equal(bits(own[name]), bits(found[name][inside])), name


def test_the_width_changes_no_bit_of_many_documents(run):
    """Without h and v', very many CTAs are wide."""
    pack = make_pack((70, *range(1, 80)), "bf16_k128", H=8, HV=8, **FUSED)
    tiles = run_prepare(pack)
    found, bare = run(pack, tiles), run(pack, tiles, h=None, v_new=None)
    assert_like_twin(pack, tiles, found)
    for name, tensor in bare.items():
        assert torch.equal(bits(tensor), bits(found[name])), name


def test_absent_outputs_change_no_bit(run):
    pack = make_pack((130, 5), "bf16_k128", **FUSED)
    tiles = run_prepare(pack)
    everything = run(pack, tiles)
    found = run(pack, tiles, h=None, v_new=None, checkpoints=None, final_state=None)
    assert torch.equal(found["o"], everything["o"]) and found.keys() == {"o"}


def test_more_segments_than_a_grid_has_rows(launcher):
    """grid.y and grid.z stop at 65,535; all documents but two are empty."""
    pack = make_pack((3, *[0] * 70_000, 4), "bf16_k64", HV=1, **FUSED, initial_state=None)
    nothing = dict.fromkeys(("initial_state", "segment_entry", "final_state", "h", "v_new", "checkpoints", "ready"))
    values = scan_values(pack, run_prepare(pack)) | nothing | {"checkpoint_chunks": 0}
    found, expected = poisoned(7, 1, 64, dtype=torch.bfloat16), poisoned(7, 1, 64, dtype=torch.bfloat16)
    launcher("chunk_scan", pack.variant, values | {"o": found}, {"o": found})
    launch_twin("chunk_scan", pack.variant, values | {"o": expected}, {})
    assert_close("o", by_head("o", found), by_head("o", expected), TWIN_TOLERANCE)


@pytest.mark.parametrize("case", BAD_SCANS)
def test_bad_arguments_are_refused(run, case):
    change, message = BAD_SCANS[case]
    pack = make_pack((70,), "bf16_k64", H=2, HV=4, **FUSED)
    with pytest.raises(UnsupportedProblemError, match=message):
        run(pack, run_prepare(pack), **change)


def test_a_row_without_a_document_writes_nothing(run):
    pack = make_pack((70,), "bf16_k64", **FUSED)
    tables = replace(pack.tables, segment_table=edited(pack.tables.segment_table, 0, 0, -1))
    found = run(replace(pack, tables=tables), run_prepare(pack))
    assert all(tensor.isnan().all() for tensor in found.values())
