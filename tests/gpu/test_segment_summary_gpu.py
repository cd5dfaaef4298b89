"""segment_summary on a CUDA device: against its cpu twin and FP64 on the same tiles, outputs poisoned with NaN."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from cake_kda_jit.bench.problems import relative_error
from cake_kda_jit.errors import UnsupportedProblemError

from ..programs.pipeline import (
    Pack,
    exact_beta,
    make_pack,
    make_tables,
    poisoned,
    run_prepare,
    scan_values,
)
from ..programs.test_segment_summary import BAD
from .twins import (
    VARIANTS,
    assert_close,
    bits,
    device_has,
    document_of,
    launch_on_device,
    launch_twin,
    launcher_fixture,
)

pytestmark = pytest.mark.gpu

LENGTHS = (0, 300, 64, 130, 40)  # in segments of 128 tokens: one without tokens, three, one, two, one
FUSED = {"gate_form": "ready", "beta_form": "sigmoid", "l2norm": True}
# S, beta x, dv', z and beta z are rounded to bf16 as factors, 2^-9 each, which the twin does with v' and z alone.
TWIN_TOLERANCE = 4e-3
# Two bf16 parts hold 16 bits: a factor is up to 2^-17 off, 8e-6. Where 64 chunks shrink M to 4e-6 of what it was, their
# errors add up to 1.5e-5 of it; where it stays near the identity to 2.3e-7.
MAP_TOLERANCE = 2e-5


def make_weak_pack(lengths, variant="bf16_k128", *, strength=0.02, segment_tokens=128, **options) -> Pack:
    """Weak gates, so that M of a whole segment is not 0; every segment is summarised."""
    pack = make_pack(lengths, variant, **FUSED | options)
    pack.g.mul_(strength)
    return pack.cut(segment_tokens, summarize_all=1)


def summarize(pack: Pack, tiles, *, launcher, heads=None, backward=0, **given):
    """M and B (D backwards) of one launch, None where ``given`` says so."""
    rows = int(pack.tables.summary_offsets[-1])
    outputs = {name: poisoned(rows, pack.HV, pack.K, pack.K) for name in "MB"}
    options = {"backward": backward, "skip_first_M": 0, "skip_first_B": 0, "skip_last_B": 0}
    gradient = {"do_": pack.do, "do_strides": pack.do.stride()}
    values = scan_values(pack, tiles, heads) | gradient | options | outputs | given
    launcher("segment_summary", pack.variant, values, outputs)
    return tuple(values[name] for name in "MB")


launcher = launcher_fixture("segment_summary")


@pytest.fixture
def run(launcher):
    return partial(summarize, launcher=launcher)


def exact_maps(pack: Pack, tiles):
    """M of every segment by its chunks' factors, in FP64 on the tiles."""
    tiles = {name: tile.double() for name, tile in tiles.items()}
    beta, chunks, maps = exact_beta(pack).T.unsqueeze(-1), pack.tables.chunks(), []
    for _, first_chunk, num_chunks, _ in pack.tables.segments():
        M = torch.eye(pack.K, dtype=torch.float64).repeat(pack.HV, 1, 1)
        for chunk in range(first_chunk, first_chunk + num_chunks):
            _, token, count, _ = chunks[chunk]
            ke, kg = (tiles[name][:, chunk, :count] for name in ("ke", "kg"))
            w = tiles["Tinv"][:, chunk, :count, :count] @ (beta[:, token : token + count] * ke)
            M = tiles["decay_total"][:, chunk].unsqueeze(-1) * M - kg.mT @ (w @ M)
        maps.append(M)
    return torch.stack(maps)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_segment(run, variant):
    pack = make_weak_pack(LENGTHS, variant, HV=3)
    tiles = run_prepare(pack)
    M, B = run(pack, tiles)
    backward_M, D = run(pack, tiles, backward=1)
    assert torch.equal(M, backward_M)
    _, twin_B = run(pack, tiles, launcher=launch_twin)
    _, twin_D = run(pack, tiles, launcher=launch_twin, backward=1)
    exact_M = exact_maps(pack, tiles)
    assert exact_M[1].norm() > 0.1, "the problem's M is worth computing"
    assert_close("M", M, exact_M, MAP_TOLERANCE)
    assert_close("B", B, twin_B, TWIN_TOLERANCE)
    assert_close("D", D, twin_D, TWIN_TOLERANCE)
    assert torch.equal(M[0], torch.eye(pack.K).expand_as(M[0])) and not B[0].any() and not D[0].any()


@pytest.mark.parametrize("beta_shift", [0.0, -6.0])
def test_M_of_64_chunks(run, beta_shift):
    """Gates near 0: with small beta M stays near the identity, and nothing forgets an early chunk's error."""
    pack = make_weak_pack((4096,), strength=0.0002, segment_tokens=4096)
    pack.beta.add_(beta_shift)
    tiles = run_prepare(pack)
    M, B = run(pack, tiles)
    exact_M = exact_maps(pack, tiles)
    print(f"M after 64 chunks: relative error {relative_error(M, exact_M):.2e}, norm {exact_M.norm():.2e}")
    assert_close("M", M, exact_M, MAP_TOLERANCE)
    assert_close("B", B, run(pack, tiles, launcher=launch_twin, M=None)[1], TWIN_TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_B_has_the_bits_of_a_scan_from_zero(run, variant):
    pack = make_weak_pack(LENGTHS, variant)
    tiles = run_prepare(pack)
    _, B = run(pack, tiles)
    segments = pack.tables.num_segments
    as_documents = pack.tables.segment_table.clone()
    as_documents[:, 0] = torch.arange(segments)
    tables = replace(pack.tables, segment_table=as_documents)
    outputs = {
        "o": poisoned(*pack.v.shape, dtype=pack.v.dtype),
        "final_state": poisoned(segments, pack.HV, pack.K, pack.K),
    }
    nothing = dict.fromkeys(("h", "v_new", "checkpoints", "initial_state", "segment_entry", "ready"))
    values = scan_values(replace(pack, tables=tables), tiles) | outputs | nothing | {"checkpoint_chunks": 0}
    launch_on_device("chunk_scan", pack.variant, values, outputs)
    assert torch.equal(B, outputs["final_state"])


@pytest.mark.skipif(not torch.cuda.is_available() or not device_has("sm90"), reason="needs the family sm90")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("backward", [0, 1])
def test_families_agree_in_every_bit(variant, backward):
    """So what one family summarized may be walked and scanned by another."""
    pack = make_weak_pack((0, 64 * 11 + 5, 130), variant, H=1, HV=2, segment_tokens=64 * 9)
    tiles = run_prepare(pack)
    found, expected = (
        summarize(pack, tiles, launcher=partial(launch_on_device, family=family), backward=backward)
        for family in ("sm90", "smxx")
    )
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found, expected))


@pytest.mark.parametrize("backward", [0, 1])
def test_the_number_of_ctas_changes_no_bit(run, backward):
    """Many segments leave no processor to themselves, and sm90 then walks M and B, or all of D, in one CTA."""
    pack = make_weak_pack((70, 900, *range(1, 70)), "bf16_k128", HV=1, segment_tokens=448)
    found = run(pack, run_prepare(pack), backward=backward)
    skips = {"skip_first_M": 1, "skip_last_B": 1}
    some = run(pack, run_prepare(pack), backward=backward, **skips)
    uncut = make_weak_pack(pack.lengths, "bf16_k128", HV=1, segment_tokens=0)
    for document, rows in ((0, slice(0, 1)), (1, slice(1, 4)), (60, slice(62, 63))):
        alone = document_of(uncut, document).cut(448, summarize_all=1)
        own = run(alone, run_prepare(alone), backward=backward)
        assert all(torch.equal(bits(one[rows]), bits(other)) for one, other in zip(found, own))
    for one, every in zip(some, found):
        skipped = one.isnan()
        assert skipped.any() and torch.equal(bits(one[~skipped]), bits(every[~skipped]))


def test_hard_resets_forget_the_entry_state(run):
    pack = make_weak_pack((130, 70))
    pack.g[[100, 128, 150]] = -torch.inf
    tiles = run_prepare(pack)
    for backward in (0, 1):
        M, B = run(pack, tiles, backward=backward)
        assert not M.any()
        assert_close("B", B, run(pack, tiles, launcher=launch_twin, backward=backward)[1], TWIN_TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_M_that_has_become_0_stays_so(run, variant):
    """A walk may end where its M is 0: from some chunk on, at once, in the last chunk, in one head of several."""
    lengths = (64 * 18, 64 * 9 + 5, 64 * 10, 64 * 10, 64, 64 * 17)
    pack = make_weak_pack(lengths, variant, HV=6, segment_tokens=0)  # heads enough for CTAs that share no tiles
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    for document, chunk in ((0, 5), (1, 0), (2, 9)):
        first = starts[document] + 64 * chunk
        pack.g[first : first + 64] = -5.0
    pack.g[starts[5] :, 0] = -5.0
    tiles = run_prepare(pack)
    M, B = run(pack, tiles)
    assert M.flatten(2).any(2).sum(1).tolist() == [0, 0, 0, 6, 6, 5]
    assert_close("M", M, exact_maps(pack, tiles), MAP_TOLERANCE)
    assert_close("B", B, run(pack, tiles, launcher=launch_twin)[1], TWIN_TOLERANCE)


@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("flag", ["skip_first_M", "skip_first_B", "skip_last_B"])
def test_what_is_skipped_is_left_alone(run, flag, backward):
    pack = make_weak_pack(LENGTHS, "bf16_k64")
    tiles = run_prepare(pack)
    everything = run(pack, tiles, backward=backward)
    found = run(pack, tiles, backward=backward, **{flag: 1})
    expected = run(pack, tiles, backward=backward, launcher=launch_twin, **{flag: 1})
    assert any(one.isnan().any() for one in expected)
    for one, every, twin in zip(found, everything, expected):
        skipped = twin.isnan()
        assert one[skipped].isnan().all() and torch.equal(one[~skipped], every[~skipped])


def test_only_segments_with_a_summary_row_are_summarised(run):
    everything = make_weak_pack(LENGTHS)
    tiles = run_prepare(everything)
    some = everything.cut(128)
    rows = [index for index, row in enumerate(some.tables.segments()) if row[3] >= 0]
    for backward in (0, 1):
        found, expected = run(some, tiles, backward=backward), run(everything, tiles, backward=backward)
        assert all(torch.equal(one, every[rows]) for one, every in zip(found, expected))


@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("absent", ["M", "B"])
def test_either_output_may_be_absent(run, absent, backward):
    """Then what only the other one reads may be null, and so may what only the other direction reads."""
    pack = make_weak_pack((130,))
    tiles = run_prepare(pack)
    everything = dict(zip("MB", run(pack, tiles, backward=backward)))
    unread = {"v": None} if backward or absent == "B" else {"qg": None, "Aqk": None, "do_": None}
    found = dict(zip("MB", run(pack, tiles, backward=backward, **{absent: None}, **unread)))
    [present] = set("MB") - {absent}
    assert found[absent] is None and torch.equal(found[present], everything[present])


def test_head_blocks_neighbours_and_strides(run):
    pack = make_weak_pack((40, 170, 9), H=2, HV=4)
    tiles = run_prepare(pack)
    rows = {name: getattr(pack, name)[40:210] for name in ("q", "k", "v", "g", "beta", "do")}
    alone = replace(pack, **rows, lengths=(170,), tables=make_tables((170,), 128, summarize_all=1))
    nans = torch.full((240, 4, 128, 2), float("nan"), dtype=torch.bfloat16)
    nans[:219, ..., 0], nans[:219, ..., 1] = pack.v, pack.do
    strided = replace(pack, v=nans[..., 0], do=nans[..., 1])
    for backward in (0, 1):
        whole = run(pack, tiles, backward=backward)
        own = run(alone, run_prepare(alone), backward=backward)
        assert all(torch.equal(one[1:3], other) for one, other in zip(whole, own))
        hidden = run(strided, tiles, backward=backward)
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(whole, hidden))
        part = run(pack, run_prepare(pack, (2, 2)), heads=(2, 2), backward=backward)
        for one, every in zip(part, whole):
            assert torch.equal(one[:, 2:], every[:, 2:]) and one[:, :2].isnan().all()


@pytest.mark.parametrize("backward", [0, 1])
def test_same_bits_every_time(run, backward):
    pack = make_weak_pack((700, 70, 300), H=2, HV=4)
    tiles = run_prepare(pack)
    found = run(pack, tiles, backward=backward)
    for _ in range(10):
        again = run(pack, tiles, backward=backward)
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found, again))


@pytest.mark.parametrize("case", sorted(BAD.keys() - {"no threads"}))
def test_bad_arguments_are_refused(run, case):
    change, message = BAD[case]
    pack = make_weak_pack((70,), "bf16_k64", H=2, HV=4)
    with pytest.raises(UnsupportedProblemError, match=message):
        run(pack, run_prepare(pack), **change)
