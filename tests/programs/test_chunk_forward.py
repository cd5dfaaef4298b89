"""chunk_forward (cpu) against the FP64 recurrence: every record and input form, edges of documents and of numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cake_kda_jit.errors import UnsupportedProblemError

from .attention import (
    DTYPES,
    argument_values,
    assert_all_near,
    assert_equal_bits,
    forward_outputs,
    launch,
    make_pack,
    record_of,
    records_of,
    reference,
    run_forward,
)

EDGES = (0, 1, 63, 64, 0, 65)
FUSED = {"gate_form": "softplus", "beta_form": "sigmoid", "l2norm": True}
INPUTS = ("q", "k", "v", "g", "beta")


@pytest.mark.parametrize("record", records_of("chunk_forward"), ids=lambda record: record.variant)
def test_every_record(record):
    constants = record.constants
    pack = make_pack(EDGES, dtype=DTYPES[constants["dtype"]], K=constants["head_dim"], **FUSED)
    outputs = run_forward(pack)
    assert_all_near(outputs, reference(pack, gradients=False))
    assert torch.isfinite(outputs["chunk_states"]).all()


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("beta_form", ["ready", "sigmoid", "two_sigmoid"])
@pytest.mark.parametrize("gate_form", ["ready", "softplus", "bounded"])
def test_every_input_form(gate_form, beta_form, l2norm):
    pack = make_pack((70, 3), gate_form=gate_form, beta_form=beta_form, l2norm=l2norm, seed=1)
    assert_all_near(run_forward(pack), reference(pack, gradients=False))


@pytest.mark.parametrize("absent", [("A_log",), ("dt_bias",), ("A_log", "dt_bias")])
def test_bounded_gate_without_parameters(absent):
    pack = make_pack((66,), gate_form="bounded", **dict.fromkeys(absent))
    assert_all_near(run_forward(pack), reference(pack, gradients=False))


@pytest.mark.parametrize(("H", "HV"), [(1, 1), (3, 3), (2, 6)])
def test_head_groups(H, HV):
    pack = make_pack((67,), H=H, HV=HV, **FUSED)
    assert_all_near(run_forward(pack), reference(pack, gradients=False))


@pytest.mark.parametrize("g_dtype", list(DTYPES.values()), ids=list(DTYPES))
def test_gate_and_beta_have_a_dtype_of_their_own(g_dtype):
    pack = make_pack((66, 2), dtype=torch.bfloat16, g_dtype=g_dtype, **FUSED)
    assert_all_near(run_forward(pack), reference(pack, gradients=False))


def test_kept_states_are_the_states_of_the_prefixes():
    pack = make_pack((130, 0, 65))
    states = run_forward(pack)["chunk_states"]
    chunk = 0
    for document, length in enumerate((130, 0, 65)):
        for tokens in range(0, length, 64):
            prefix = make_prefix(pack.document(document), tokens)
            assert torch.equal(states[chunk], run_forward(prefix)["final_state"][0])
            chunk += 1
    assert chunk == len(states)


def make_prefix(pack, tokens):
    rows = {name: getattr(pack, name)[:tokens] for name in (*INPUTS, "do")}
    return replace(pack, boundaries=(0, tokens), **rows)


def test_absent_initial_state_is_zero():
    pack = make_pack((65, 0))
    pack = replace(pack, initial_state=torch.zeros_like(pack.initial_state))
    assert_equal_bits(run_forward(replace(pack, initial_state=None)), run_forward(pack))


def test_optional_outputs():
    pack = make_pack((65,))
    outputs = forward_outputs(pack)
    absent = dict.fromkeys(("final_state", "chunk_states"))
    launch(record_of("chunk_forward", pack), argument_values(pack) | outputs | absent)
    assert torch.equal(outputs["o"], run_forward(pack)["o"])
    assert outputs["final_state"].isnan().all() and outputs["chunk_states"].isnan().all()


def test_packs_without_tokens():
    pack = make_pack((0, 0))
    assert torch.equal(run_forward(pack)["final_state"], pack.initial_state)
    assert run_forward(make_pack(()))["o"].numel() == 0


def test_hard_resets():
    pack = make_pack((100, 4), seed=2)
    some, every = slice(0, None, 3), slice(None)
    for row, channels in ((0, every), (17, every), (40, some), (64, every), (101, some)):
        pack.g[row, :, channels] = -torch.inf
    outputs = run_forward(pack)
    assert_all_near(outputs, reference(pack, gradients=False))
    other = replace(pack, v=pack.v.clone(), initial_state=pack.initial_state + 1)
    other.v[:17] = 9.0
    assert torch.equal(run_forward(other)["o"][17:64], outputs["o"][17:64]), "a reset forgets everything, to the bit"


@pytest.mark.parametrize("log_decay", [-1e-8, -5.0, -30.0, -60.0, -86.0, -100.0])
def test_constant_gates_of_every_strength(log_decay):
    pack = make_pack((130,))
    pack.g.fill_(log_decay)
    assert_all_near(run_forward(pack), reference(pack, gradients=False))


def test_correlated_keys():
    pack = make_pack((130,), l2norm=True)
    common = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(5))
    # cosine 0.9 between any two keys, beta 0.95, almost no decay: where a Neumann series loses a third of the result
    pack = replace(pack, k=pack.k / pack.k.norm(dim=-1, keepdim=True) * 0.333 + common / common.norm())
    pack.beta.fill_(0.95)
    pack.g.fill_(-0.01)
    assert_all_near(run_forward(pack), reference(pack, gradients=False))


def test_softplus_far_below_zero():
    """One token reads exp(g) of what it enters: a plain log(1 + e^x) would be 1e-4 wrong at -7 and exactly 0 at -18."""
    pack = make_pack((1,) * 4, HV=1, gate_form="softplus")
    raw = torch.tensor([-7.0, -12.0, -18.0, -30.0])
    ones = torch.ones_like(pack.initial_state)
    pack = replace(pack, A_log=torch.tensor([4.0]), dt_bias=torch.zeros(1, 64), initial_state=ones)
    pack.g[:] = raw[:, None, None]
    pack.v.zero_(), pack.k.zero_()
    decay = torch.exp(-torch.exp(torch.tensor(4.0).double()) * torch.log1p(torch.exp(raw.double())))
    error = run_forward(pack)["final_state"].double() - decay[:, None, None, None]
    # one rounding of a number below 1, and those of a gate of 0.05 at most
    assert error.abs().max() <= 1.5 * 2.0**-24


def test_later_tokens_never_reach_earlier_ones():
    pack = make_pack((70, 22), **FUSED)
    expected = run_forward(pack)["o"]
    changed = replace(pack, **{name: getattr(pack, name).clone() for name in INPUTS})
    for name in INPUTS:
        getattr(changed, name)[21:70] = torch.nan
    found = run_forward(changed)["o"]
    assert torch.equal(found[:21], expected[:21]) and torch.equal(found[70:], expected[70:])


def test_bits_do_not_depend_on_threads():
    pack = make_pack((65, 3, 64), H=2, HV=4, **FUSED)
    expected = run_forward(pack, num_threads=1)
    for num_threads in (2, 3, 40):
        assert_equal_bits(run_forward(pack, num_threads), expected)


def test_bits_do_not_depend_on_neighbours():
    pack = make_pack((5, 130, 0, 66), **FUSED)
    together = run_forward(pack)
    offsets = pack.chunk_offsets()
    for index in range(pack.documents):
        alone = run_forward(pack.document(index))
        assert torch.equal(alone["o"], together["o"][pack.boundaries[index] : pack.boundaries[index + 1]])
        assert torch.equal(alone["final_state"][0], together["final_state"][index])
        assert torch.equal(alone["chunk_states"], together["chunk_states"][offsets[index] : offsets[index + 1]])


def test_strided_inputs():
    pack = make_pack((66, 4), dtype=torch.bfloat16, H=2, HV=2, **FUSED)
    views = {name: strided(getattr(pack, name)) for name in INPUTS}
    assert not any(view.is_contiguous() for view in views.values())
    assert_equal_bits(run_forward(replace(pack, **views)), run_forward(pack))


def strided(tensor):
    """The same values with every stride changed: dimensions stored in reverse order, each second element used."""
    order = tuple(reversed(range(tensor.dim())))
    storage = torch.full([2 * size for size in tensor.permute(order).shape], torch.nan, dtype=tensor.dtype)
    view = storage[tuple(slice(0, None, 2) for _ in order)].permute(order)
    return view.copy_(tensor)


def test_offsets_beyond_32_bits():
    pack = make_pack((2,), dtype=torch.bfloat16, HV=1)
    distance = 2**31 + 64
    storage = torch.empty(distance + 64, dtype=torch.bfloat16)  # never touched between its two rows
    far = storage.as_strided((2, 1, 64), (distance, 64, 1)).copy_(pack.k)
    assert_equal_bits(run_forward(replace(pack, k=far)), run_forward(pack))


def test_denormals_of_the_caller_are_left_alone():
    pack = make_pack((64,), K=64)
    run_forward(pack, num_threads=1)
    assert (torch.tensor([1e-40]) * 0.5).item() != 0.0


REFUSALS = [
    ({"num_heads": 0}, "num_heads is 0; it must be at least 1"),
    ({"num_value_heads": 0}, "num_value_heads is 0; it must be a positive multiple of num_heads, which is 2"),
    ({"num_value_heads": 3}, "num_value_heads is 3; it must be a positive multiple of num_heads, which is 2"),
    ({"num_threads": 0}, "num_threads is 0"),
    ({"num_documents": -1}, "num_documents is -1"),
    ({"cu_seqlens": None}, "cu_seqlens is null"),
    ({"chunk_offsets": None}, "chunk_offsets is null"),
    ({"cu_seqlens": torch.tensor([1, 5, 8])}, "start at 1 and 0"),
    ({"cu_seqlens": torch.tensor([0, 12, 8])}, "cu_seqlens decreases from 12 to 8 at document 1"),
    ({"chunk_offsets": torch.tensor([0, 1, 3])}, "document 1 of 3 tokens has 2 chunks"),
    ({"q": None}, "q is null; the pack has 8 tokens"),
    ({"beta": None}, "beta is null"),
    ({"o": None}, "o is null"),
    ({"g_dtype": 3}, "g_dtype is 3 and beta_dtype is 2"),
    ({"beta_dtype": -1}, "beta_dtype is -1"),
    ({"gate_form": 5}, "gate_form is 5"),
    ({"gate_form": 1}, "A_log is null; the softplus gate"),
    ({"gate_form": 2, "lower_bound": -5.5}, "lower_bound is -5.5"),
    ({"gate_form": 2, "lower_bound": 0.0}, "lower_bound is 0"),
    ({"beta_form": 3}, "beta_form is 3"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[message.split(";")[0] for _, message in REFUSALS])
def test_refusals(changes, message):
    pack = make_pack((5, 3), H=2, HV=2)
    outputs = forward_outputs(pack)
    with pytest.raises(UnsupportedProblemError) as caught:
        launch(record_of("chunk_forward", pack), argument_values(pack) | outputs | changes)
    assert message in str(caught.value)
    assert outputs["o"].isnan().all(), "nothing runs after a refusal"
