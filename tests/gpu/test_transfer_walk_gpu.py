"""transfer_walk on a CUDA device: every record against FP64, outputs poisoned with NaN, what must not change a bit."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

from cake_kda_jit import last_launches, transfer_walk
from cake_kda_jit.arch import ARCHES
from cake_kda_jit.bench.walk_precision import CASES
from cake_kda_jit.bench.walk_precision import make_summaries as make_real_summaries
from cake_kda_jit.catalog import registry
from cake_kda_jit.errors import UnsupportedProblemError
from cake_kda_jit.ops.select import select_walk
from cake_kda_jit.programs.transfer_walk import FAMILY_FORMS
from cake_kda_jit.reference import transfer_walk_reference
from cake_kda_jit.runtime.device import arch_of_device, current_stream
from cake_kda_jit.runtime.load import get_kernel

from ..programs.walks import make_states, make_summaries, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_poison")]

# (family, variant) of every record for CUDA; one that does not build for the device is skipped.
RECORDS = [(family, form) for family in ("sm90", "smxx") for form in FAMILY_FORMS[family]]
DEFAULT_FORMS = [(family, form) for family, form in RECORDS if form.startswith("bf16x3")]
# What differs in width alone, by family and form: there are two kernels in sm90, of which bf16x3 has both.
WIDTHS: dict[tuple[str, str], list[tuple[str, str]]] = {}
for record in RECORDS:
    WIDTHS.setdefault((record[0], re.sub(r"_hw\d+$", "", record[1])), []).append(record)
WIDTHS = {form: records for form, records in WIDTHS.items() if len(records) > 1}

# Relative Frobenius error of each splitting, flat in the number of fragments: what truncating accumulation leaves. Each
# is half as much again as its design, since truncation depends on the states; near the identity it takes most of that.
BOUNDS = {
    "bf16x3": 5e-7,
    "tf32_hilo": 1.2e-6,
    "tf32_hilo_three_mma": 1.2e-6,
    "tf32_hilo_plain_tf32": 5e-4,
}

# How the public operation is asked for a record.
OPTIONS = {
    "bf16x3_hw64": {"variant": "bf16x3_hw64"},
    "bf16x3": {"variant": "bf16x3"},
    "tf32_hilo": {"variant": "tf32_hilo"},
    "tf32_hilo_three_mma": {"variant": "tf32_hilo", "precision_mode": 1},
    "tf32_hilo_plain_tf32": {"variant": "tf32_hilo", "precision_mode": 2},
}


def bound_of(record):
    return BOUNDS[re.sub(r"_hw\d+$", "", record[1])]


def on_device(*tensors):
    return tuple(None if tensor is None else tensor.cuda() for tensor in tensors)


def launch_walk(record, M, B, initial, offsets, transpose=False, **changes):
    """Launch a record's library, with changed arguments, into outputs full of NaN; returns CPU tensors."""
    family, variant = record
    found = registry().get("transfer_walk", variant, family)
    arch = arch_of_device(torch.device("cuda", torch.cuda.current_device()))
    if arch.name not in found.archs:
        pytest.skip(f"{found.name} does not build for {arch.name}")
    M, B, initial = on_device(M, B, initial)
    offsets = torch.tensor(offsets, device="cuda")
    chains, (heads, head_dim) = len(offsets) - 1, B.shape[1:3]
    entry, exit_ = torch.full_like(B, float("nan")), B.new_full((chains, *B.shape[1:]), float("nan"))
    values = {
        "M": M.data_ptr(),
        "B": B.data_ptr(),
        "initial": None if initial is None else initial.data_ptr(),
        "offsets": offsets.data_ptr(),
        "entry": entry.data_ptr(),
        "exit": exit_.data_ptr(),
        "num_chains": chains,
        "num_value_heads": heads,
        "first_head": 0,
        "num_block_heads": heads,
        "head_dim": head_dim,
        "transpose": int(transpose),
    }
    get_kernel(found, arch).launch(values | changes, current_stream(M.device.index))
    return entry.cpu(), exit_.cpu()


def assert_within(found, expected, tolerance):
    """Every fragment's and every chain's state, one by one: a global norm would hide a local error.

    The worst of a hundred may be a quarter worse than the bound on the error of a whole walk's states.
    """
    for name, one, other in zip(("entry", "exit"), found, expected):
        for index in range(len(one)):
            for head in range(one.shape[1]):
                error = relative_error(one[index, head], other[index, head])
                assert error < 1.25 * tolerance, (name, index, head, error)


@cache
def expected_walk(fragments, heads, head_dim, seed, offsets, transpose):
    """Summaries, initial states and FP64's answer, shared by all records."""
    M, B = make_summaries(fragments, heads, head_dim, seed=seed)
    initial = make_states(len(offsets) - 1, heads, head_dim)
    return M, B, initial, transfer_walk_reference(M, B, initial, list(offsets), transpose)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("record", RECORDS, ids=" ".join)
def test_long_chain(record, transpose):
    M, B, initial, expected = expected_walk(64, 2, 128, 0, (0, 64), transpose)
    assert_within(launch_walk(record, M, B, initial, [0, 64], transpose), expected, bound_of(record))


@pytest.mark.parametrize("fragments", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("record", RECORDS, ids=" ".join)
def test_fragment_counts(record, fragments):
    M, B, initial, _ = expected_walk(64, 2, 128, 0, (0, 64), False)
    M, B = M[:fragments], B[:fragments]
    expected = transfer_walk_reference(M, B, initial, [0, fragments])
    assert_within(launch_walk(record, M, B, initial, [0, fragments]), expected, bound_of(record))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 32])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("record", RECORDS, ids=" ".join)
def test_ragged_chains(record, head_dim, heads, transpose):
    offsets = (0, 0, 3, 4, 4, 9, 9)
    M, B, initial, expected = expected_walk(9, heads, head_dim, 2, offsets, transpose)
    entry, exit_ = launch_walk(record, M, B, initial, offsets, transpose)
    assert_within((entry, exit_), expected, bound_of(record))
    for empty in (0, 3, 5):
        assert torch.equal(exit_[empty], initial[empty])
    first = (2, 3, 8) if transpose else (0, 3, 4)
    assert torch.equal(entry[list(first)], initial[[1, 2, 4]])


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [1, 3, 32])
@pytest.mark.parametrize("form", WIDTHS, ids=" ".join)
def test_value_width_changes_no_bit(form, heads, head_dim, transpose):
    offsets = (0, 3, 3, 9)
    M, B, initial, _ = expected_walk(9, heads, head_dim, 2, offsets, transpose)
    walks = [launch_walk(record, M, B, initial, offsets, transpose) for record in WIDTHS[form]]
    for other in walks[1:]:
        assert torch.equal(other[0], walks[0][0]) and torch.equal(other[1], walks[0][1])


@pytest.mark.parametrize("record", RECORDS, ids=" ".join)
def test_same_bits_every_time(record):
    M, B = make_summaries(12, 8, 128)
    initial = make_states(2, 8, 128)
    entry, exit_ = launch_walk(record, M, B, initial, [0, 5, 12])
    for _ in range(20):
        again = launch_walk(record, M, B, initial, [0, 5, 12])
        assert torch.equal(again[0], entry) and torch.equal(again[1], exit_)


@pytest.mark.parametrize("record", DEFAULT_FORMS, ids=" ".join)
def test_neighbours_change_no_bit(record):
    M, B = make_summaries(6, 3, 128)
    initial = make_states(2, 3, 128)
    entry, exit_ = launch_walk(record, M, B, initial, [0, 2, 6])
    alone_entry, alone_exit = launch_walk(record, M[2:], B[2:], initial[1:], [0, 4])
    assert torch.equal(entry[2:], alone_entry) and torch.equal(exit_[1:], alone_exit)


@pytest.mark.parametrize("record", DEFAULT_FORMS, ids=" ".join)
def test_absent_initial_is_zero(record):
    M, B = make_summaries(3, 2, 128)
    absent = launch_walk(record, M, B, None, [0, 0, 3])
    zeros = launch_walk(record, M, B, torch.zeros(2, 2, 128, 128), [0, 0, 3])
    assert torch.equal(absent[0], zeros[0]) and torch.equal(absent[1], zeros[1])


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("record", DEFAULT_FORMS, ids=" ".join)
def test_identity_keeps_every_bit(record, transpose):
    """Three bf16 parts hold the 24 bits of fp32, and summing them back loses none."""
    M, B, initial = torch.eye(128).view(1, 1, 128, 128), torch.zeros(1, 1, 128, 128), make_states(1, 1, 128)
    assert torch.equal(launch_walk(record, M, B, initial, [0, 1], transpose)[1], initial)


@pytest.mark.parametrize(("term", "truncated"), [(0.75 * 2.0**-23, 1.0), (-0.25 * 2.0**-23, 1.0 - 2.0**-24)])
@pytest.mark.parametrize("k", [1, 100], ids=["same step", "later step"])
@pytest.mark.parametrize("record", RECORDS, ids=" ".join)
def test_accumulation_truncates(record, term, truncated, k):
    """What the cpu family emulates and why there are two accumulators: the device's tensor cores do not round.

    1 + 3/4 ulp gives 1, 1 - 1/4 ulp gives 1 - 1/2 ulp: within a step of the inner sum and from step to step.
    """
    M, B, initial = (torch.zeros(1, 1, 128, 128) for _ in range(3))
    M[..., 0, 0] = initial[..., 0, 7] = 1.0
    M[..., 0, k], initial[..., k, 7] = 1.0, term
    assert launch_walk(record, M, B, initial, [0, 1])[1][0, 0, 0, 7].item() == truncated


@pytest.mark.parametrize("record", RECORDS, ids=" ".join)
def test_last_addition_rounds(record):
    """B meets one rounding to nearest: 1 + 3/4 ulp gives 1 + 1 ulp."""
    M, B, initial = (torch.zeros(1, 1, 64, 64) for _ in range(3))
    M[..., 0, 0] = initial[..., 0, 7] = 1.0
    B[..., 0, 7] = 0.75 * 2.0**-23
    assert launch_walk(record, M, B, initial, [0, 1])[1][0, 0, 0, 7].item() == 1.0 + 2.0**-23


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("record", RECORDS, ids=" ".join)
def test_what_is_not_needed_is_not_read(record, transpose):
    """From no state M of a chain's first fragment, and where nothing asks for the exit the last fragment: all NaN."""
    M, B = (tensor.clone() for tensor in make_summaries(6, 2, 128, seed=3))
    offsets = [0, 4, 4, 5, 6]
    expected, _ = launch_walk(record, M, B, None, offsets, transpose)
    first, last = ([3, 4, 5], [0, 4, 5]) if transpose else ([0, 4, 5], [3, 4, 5])
    M[first], M[last], B[last] = float("nan"), float("nan"), float("nan")
    entry, exit_ = launch_walk(record, M, B, None, offsets, transpose, exit=None)
    assert torch.equal(entry, expected) and exit_.isnan().all()


@pytest.mark.parametrize("record", RECORDS, ids=" ".join)
def test_nan_stays_in_its_column(record):
    M, B = make_summaries(2, 1, 128)
    initial = make_states(1, 1, 128)
    initial[0, 0, 5, 9] = float("nan")
    exit_ = launch_walk(record, M, B, initial, [0, 2])[1][0, 0]
    assert exit_[:, 9].isnan().all() and exit_.isnan().sum() == 128


@pytest.mark.parametrize("record", RECORDS, ids=" ".join)
def test_head_blocks_have_the_bits_of_the_whole(record):
    M, B = make_summaries(4, 5, 128, seed=4)
    initial = make_states(2, 5, 128)
    whole, whole_exit = launch_walk(record, M, B, initial, [0, 1, 4])
    entry, exit_ = launch_walk(record, M, B, initial, [0, 1, 4], first_head=1, num_block_heads=3)
    assert torch.equal(entry[:, 1:4], whole[:, 1:4]) and torch.equal(exit_[:, 1:4], whole_exit[:, 1:4])
    assert entry[:, [0, 4]].isnan().all() and exit_[:, [0, 4]].isnan().all()


@cache
def real_walk(case, transpose):
    """256 summaries of real-looking tokens, one head, and the states after each count of them in FP64."""
    M, B = make_real_summaries(CASES[case], 256, heads=1, head_dim=128)
    initial = make_states(1, 1, 128)
    return M, B, initial, transfer_walk_reference(M, B, initial, [0, 256], transpose)


def states_after(walked, transpose):
    entry, exit_ = walked
    return torch.cat([entry.flip(0) if transpose else entry, exit_])


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("record", RECORDS, ids=" ".join)
def test_precision_of_real_summaries(record, case, transpose):
    """After 1 to 256 segments: near-identity M, weak and strong gates, correlated keys. The error does not grow."""
    M, B, initial, expected = real_walk(case, transpose)
    found = states_after(launch_walk(record, M, B, initial, [0, 256], transpose), transpose)
    expected = states_after(expected, transpose)
    errors = {count: relative_error(found[count], expected[count]) for count in (1, 4, 16, 64, 256)}
    print(f"{record[0]} {record[1]}, {case}: " + " ".join(f"{error:.1e}" for error in errors.values()))
    assert max(errors.values()) <= bound_of(record)
    assert errors[256] < 1.3 * max(errors[1], errors[4], errors[16]), "the error grows with the number of segments"


@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["default", *OPTIONS])
@pytest.mark.parametrize("heads", [3, 40, 96])
def test_public_operation_has_the_bits_of_the_record_that_it_names(options, heads):
    M, B, initial, _ = expected_walk(3, heads, 128, 2, (0, 3), False)
    found = transfer_walk(*on_device(M, B, initial), torch.tensor([0, 3], device="cuda"), **options)
    (launched,) = last_launches()
    arch = arch_of_device(found[0].device)
    expected = select_walk(
        arch.name, options.get("variant"), options.get("precision_mode", 0), num_walks=heads, head_dim=128
    ).record
    assert (launched.family, launched.variant) == (expected.family, expected.variant)
    direct = launch_walk((expected.family, expected.variant), M, B, initial, [0, 3])
    assert torch.equal(found[0].cpu(), direct[0]) and torch.equal(found[1].cpu(), direct[1])


def test_the_best_family_of_the_device_is_chosen():
    arch = arch_of_device(torch.device("cuda", torch.cuda.current_device()))
    chosen = select_walk(arch.name, None, 0, num_walks=32, head_dim=128).record
    assert chosen.family == ARCHES[arch.name].families[0]


def test_refuses_a_misaligned_tensor():
    """A view that starts in the middle of 16 bytes: the kernel loads quads."""
    M, B = torch.zeros(64 * 64 + 1, device="cuda")[1:].view(1, 1, 64, 64), torch.zeros(1, 1, 64, 64, device="cuda")
    with pytest.raises(UnsupportedProblemError, match="M is 0x.*multiple of 16"):
        transfer_walk(M, B, None, torch.tensor([0, 1]))


@pytest.mark.parametrize("record", [("sm90", "bf16x3_hw32"), ("smxx", "bf16x3_hw64")], ids=" ".join)
def test_more_chains_than_a_grid_has_rows(record):
    """grid.y and grid.z stop at 65,535; most chains here are empty, so that memory stays small."""
    chains = 70_000
    M, B = make_summaries(2, 1, 64)
    initial = torch.zeros(chains, 1, 64, 64)
    initial[0], initial[-1] = make_states(2, 1, 64)
    offsets = [0] + [1] * (chains - 1) + [2]
    entry, exit_ = launch_walk(record, M, B, initial, offsets)
    ends = [0, chains - 1]
    expected = transfer_walk_reference(M, B, initial[ends], [0, 1, 2])
    assert_within((entry, exit_[ends]), expected, bound_of(record))
    assert not exit_[1:-1].any()
