"""transfer_walk on a CUDA device: every form against FP64, outputs poisoned with NaN, what must not change a bit."""

from __future__ import annotations

import pytest
import torch

from cake_kda_jit import last_launches, transfer_walk
from cake_kda_jit.catalog import registry
from cake_kda_jit.errors import UnsupportedProblemError
from cake_kda_jit.reference import transfer_walk_reference
from cake_kda_jit.runtime.device import arch_of_device, current_stream
from cake_kda_jit.runtime.load import get_kernel

from ..programs.walks import FORM_ERRORS, make_states, make_summaries, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_poison")]

# How the public operation names each form.
FORM_OPTIONS = {
    "bf16x3_hw64": {},
    "bf16x3": {"variant": "bf16x3"},
    "tf32_hilo": {"variant": "tf32_hilo"},
    "tf32_hilo_three_mma": {"variant": "tf32_hilo", "precision_mode": 1},
    "tf32_hilo_plain_tf32": {"variant": "tf32_hilo", "precision_mode": 2},
}


def run_walk(form, M, B, initial, offsets, transpose=False):
    """Walk on the device; returns CPU tensors. The outputs' memory was NaN before."""
    M, B, initial = (None if tensor is None else tensor.cuda() for tensor in (M, B, initial))
    offsets = torch.tensor(offsets, device="cuda")
    results = transfer_walk(M, B, initial, offsets, transpose=transpose, **FORM_OPTIONS[form])
    (launched,) = last_launches()
    assert (launched.variant, launched.family) == (form, "smxx")
    return tuple(tensor.cpu() for tensor in results)


def launch_walk(form, M, B, initial, offsets, **changes):
    """Launch the library itself, with changed arguments, into outputs full of NaN; returns CPU tensors."""
    M, B, initial = (None if tensor is None else tensor.cuda() for tensor in (M, B, initial))
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
        "transpose": 0,
    }
    kernel = get_kernel(registry().get("transfer_walk", form, "smxx"), arch_of_device(M.device))
    kernel.launch(values | changes, current_stream(M.device))
    return entry.cpu(), exit_.cpu()


def assert_within(found, expected, tolerance):
    """Every fragment's and every chain's state, one by one: a global norm would hide a local error."""
    for name, one, other in zip(("entry", "exit"), found, expected):
        for index in range(len(one)):
            for head in range(one.shape[1]):
                error = relative_error(one[index, head], other[index, head])
                assert error < tolerance, (name, index, head, error)


@pytest.fixture(scope="module")
def long_chain():
    return make_summaries(64, 2, 128)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("form", FORM_OPTIONS)
def test_long_chain(form, transpose, long_chain):
    M, B = long_chain
    initial = make_states(1, 2, 128)
    expected = transfer_walk_reference(M, B, initial, [0, 64], transpose)
    assert_within(run_walk(form, M, B, initial, [0, 64], transpose), expected, 2 * FORM_ERRORS[form])


@pytest.mark.parametrize("fragments", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("form", FORM_OPTIONS)
def test_fragment_counts(form, fragments, long_chain):
    M, B = (tensor[:fragments] for tensor in long_chain)
    initial = make_states(1, 2, 128)
    expected = transfer_walk_reference(M, B, initial, [0, fragments])
    assert_within(run_walk(form, M, B, initial, [0, fragments]), expected, 2 * FORM_ERRORS[form])


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 32])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("form", FORM_OPTIONS)
def test_ragged_chains(form, head_dim, heads, transpose):
    offsets = [0, 0, 3, 4, 4, 9, 9]
    M, B = make_summaries(9, heads, head_dim, seed=2)
    initial = make_states(6, heads, head_dim)
    entry, exit_ = run_walk(form, M, B, initial, offsets, transpose)
    expected = transfer_walk_reference(M, B, initial, offsets, transpose)
    assert_within((entry, exit_), expected, 2 * FORM_ERRORS[form])
    for empty in (0, 3, 5):
        assert torch.equal(exit_[empty], initial[empty])
    first = (2, 3, 8) if transpose else (0, 3, 4)
    assert torch.equal(entry[list(first)], initial[[1, 2, 4]])


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 32])
def test_value_width_changes_no_bit(heads, transpose):
    M, B = make_summaries(7, heads, 128)
    initial = make_states(3, heads, 128)
    walks = (run_walk(form, M, B, initial, [0, 3, 3, 7], transpose) for form in ("bf16x3_hw64", "bf16x3"))
    for narrow, full in zip(*walks):
        assert torch.equal(narrow, full)


@pytest.mark.parametrize("form", FORM_OPTIONS)
def test_same_bits_every_time(form):
    M, B = make_summaries(12, 8, 128)
    initial = make_states(2, 8, 128)
    entry, exit_ = run_walk(form, M, B, initial, [0, 5, 12])
    for _ in range(20):
        again = run_walk(form, M, B, initial, [0, 5, 12])
        assert torch.equal(again[0], entry) and torch.equal(again[1], exit_)


def test_neighbours_change_no_bit():
    M, B = make_summaries(6, 3, 128)
    initial = make_states(2, 3, 128)
    entry, exit_ = run_walk("bf16x3_hw64", M, B, initial, [0, 2, 6])
    alone_entry, alone_exit = run_walk("bf16x3_hw64", M[2:], B[2:], initial[1:], [0, 4])
    assert torch.equal(entry[2:], alone_entry) and torch.equal(exit_[1:], alone_exit)


def test_absent_initial_is_zero():
    M, B = make_summaries(3, 2, 128)
    absent = run_walk("bf16x3_hw64", M, B, None, [0, 0, 3])
    zeros = run_walk("bf16x3_hw64", M, B, torch.zeros(2, 2, 128, 128), [0, 0, 3])
    assert torch.equal(absent[0], zeros[0]) and torch.equal(absent[1], zeros[1])


@pytest.mark.parametrize("form", ["bf16x3_hw64", "bf16x3"])
def test_identity_keeps_every_bit(form):
    """Three bf16 parts hold the 24 bits of fp32, and summing them back loses none."""
    M, B, initial = torch.eye(128).view(1, 1, 128, 128), torch.zeros(1, 1, 128, 128), make_states(1, 1, 128)
    assert torch.equal(run_walk(form, M, B, initial, [0, 1])[1], initial)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("form", FORM_OPTIONS)
def test_what_is_not_needed_is_not_read(form, transpose):
    """From no state M of a chain's first fragment, and where nothing asks for the exit the last fragment: all NaN."""
    M, B = (tensor.clone() for tensor in make_summaries(6, 2, 128, seed=3))
    offsets = [0, 4, 4, 5, 6]
    expected, _ = launch_walk(form, M, B, None, offsets, transpose=int(transpose))
    first, last = ([3, 4, 5], [0, 4, 5]) if transpose else ([0, 4, 5], [3, 4, 5])
    M[first], M[last], B[last] = float("nan"), float("nan"), float("nan")
    entry, exit_ = launch_walk(form, M, B, None, offsets, transpose=int(transpose), exit=None)
    assert torch.equal(entry, expected) and exit_.isnan().all()


@pytest.mark.parametrize("form", FORM_OPTIONS)
def test_head_blocks_have_the_bits_of_the_whole(form):
    M, B = make_summaries(4, 5, 128, seed=4)
    initial = make_states(2, 5, 128)
    whole, whole_exit = launch_walk(form, M, B, initial, [0, 1, 4])
    entry, exit_ = launch_walk(form, M, B, initial, [0, 1, 4], first_head=1, num_block_heads=3)
    assert torch.equal(entry[:, 1:4], whole[:, 1:4]) and torch.equal(exit_[:, 1:4], whole_exit[:, 1:4])
    assert entry[:, [0, 4]].isnan().all() and exit_[:, [0, 4]].isnan().all()


def test_refuses_a_misaligned_tensor():
    """A view that starts in the middle of 16 bytes: the kernel loads quads."""
    M, B = torch.zeros(64 * 64 + 1, device="cuda")[1:].view(1, 1, 64, 64), torch.zeros(1, 1, 64, 64, device="cuda")
    with pytest.raises(UnsupportedProblemError, match="M is 0x.*multiple of 16"):
        transfer_walk(M, B, None, torch.tensor([0, 1]))


def test_more_chains_than_a_grid_has_rows():
    """grid.y and grid.z stop at 65,535; most chains here are empty, so that memory stays small."""
    chains = 70_000
    M, B = make_summaries(2, 1, 64)
    initial = torch.zeros(chains, 1, 64, 64)
    initial[0], initial[-1] = make_states(2, 1, 64)
    offsets = [0] + [1] * (chains - 1) + [2]
    entry, exit_ = run_walk("bf16x3_hw64", M, B, initial, offsets)
    ends = [0, chains - 1]
    expected = transfer_walk_reference(M, B, initial[ends], [0, 1, 2])
    assert_within((entry, exit_[ends]), expected, 2 * FORM_ERRORS["bf16x3_hw64"])
    assert not exit_[1:-1].any()
