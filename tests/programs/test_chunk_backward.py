"""chunk_backward (cpu) against FP64 autograd of the recurrence: every record, form and edge, and what must be exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cake_kda_jit.errors import UnsupportedProblemError

from .attention import (
    DTYPES,
    assert_all_near,
    assert_equal_bits,
    backward_values,
    launch,
    make_pack,
    record_of,
    records_of,
    reference,
    run_backward,
    run_forward,
)

EDGES = (0, 1, 63, 64, 0, 65)
FUSED = {"gate_form": "softplus", "beta_form": "sigmoid", "l2norm": True}
INPUTS = ("q", "k", "v", "g", "beta")


@pytest.mark.parametrize("record", records_of("chunk_backward"), ids=lambda record: record.variant)
def test_every_record(record):
    constants = record.constants
    pack = make_pack(EDGES, dtype=DTYPES[constants["dtype"]], K=constants["head_dim"], **FUSED)
    assert_all_near(run_backward(pack), reference(pack))


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("beta_form", ["ready", "sigmoid", "two_sigmoid"])
@pytest.mark.parametrize("gate_form", ["ready", "softplus", "bounded"])
def test_every_input_form(gate_form, beta_form, l2norm):
    pack = make_pack((70, 3), gate_form=gate_form, beta_form=beta_form, l2norm=l2norm, seed=1)
    assert_all_near(run_backward(pack), reference(pack))


@pytest.mark.parametrize("absent", [("A_log",), ("dt_bias",), ("A_log", "dt_bias")])
def test_bounded_gate_without_parameters(absent):
    pack = make_pack((66,), gate_form="bounded", **dict.fromkeys(absent))
    assert_all_near(run_backward(pack), reference(pack))


@pytest.mark.parametrize(("H", "HV"), [(1, 1), (3, 3), (2, 6)])
def test_head_groups(H, HV):
    pack = make_pack((67,), H=H, HV=HV, **FUSED)
    assert_all_near(run_backward(pack), reference(pack))


@pytest.mark.parametrize("g_dtype", list(DTYPES.values()), ids=list(DTYPES))
def test_gate_and_beta_have_a_dtype_of_their_own(g_dtype):
    pack = make_pack((66, 2), dtype=torch.bfloat16, g_dtype=g_dtype, **FUSED)
    found = run_backward(pack)
    assert found["dg"].dtype == found["dbeta"].dtype == g_dtype
    assert_all_near(found, reference(pack))


def test_absent_states_are_zero():
    pack = make_pack((66, 0, 3), **FUSED)
    zero = torch.zeros_like(pack.initial_state)
    expected = run_backward(replace(pack, initial_state=zero, dfinal_state=zero))
    assert_equal_bits(run_backward(replace(pack, initial_state=None, dfinal_state=None)), expected)


def test_optional_outputs():
    pack = make_pack((66,), **FUSED)
    values, outputs = backward_values(pack, run_forward(pack)["chunk_states"])
    absent = dict.fromkeys(("dA_log", "ddt_bias", "dinitial_state", "workspace")) | {"workspace_bytes": 0}
    launch(record_of("chunk_backward", pack), values | absent)
    kept = {name: tensor for name, tensor in outputs.items() if name not in absent}
    full = run_backward(pack)
    assert_equal_bits(kept, {name: full[name] for name in kept})


def test_empty_documents_pass_the_gradient_of_their_state():
    pack = make_pack((0, 0), **FUSED)
    found = run_backward(pack)
    assert torch.equal(found["dinitial_state"], pack.dfinal_state)
    assert not found["dA_log"].any() and not found["ddt_bias"].any()
    assert not run_backward(make_pack((), **FUSED))["ddt_bias"].any()


def test_one_token_from_a_zero_state_has_no_gate_gradient():
    pack = make_pack((1,) * 64, initial_state=None)
    found = run_backward(pack)
    assert_all_near(found, reference(pack))
    assert not found["dg"].any(), "exactly 0"


def test_gates_at_the_bound():
    pack = make_pack((64,))
    pack.g.fill_(-5.0)
    assert_all_near(run_backward(pack), reference(pack))


def test_hard_resets():
    pack = make_pack((100, 4), seed=2)
    some, every = slice(0, None, 3), slice(None)
    for row, channels in ((0, every), (17, every), (40, some), (64, every), (101, some)):
        pack.g[row, :, channels] = -torch.inf
    found = run_backward(pack)
    assert_all_near(found, reference(pack))
    assert not found["dg"][pack.g == -torch.inf].any(), "a factor of exactly 0 has no gradient"


def test_correlated_keys():
    pack = make_pack((130,), l2norm=True)
    common = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(5))
    pack = replace(pack, k=pack.k / pack.k.norm(dim=-1, keepdim=True) * 0.333 + common / common.norm())
    pack.beta.fill_(0.95)
    pack.g.fill_(-0.01)
    assert_all_near(run_backward(pack), reference(pack))


def test_many_chunks():
    pack = make_pack((449,), HV=1, gate_form="bounded", beta_form="sigmoid", l2norm=True)
    # dg is a suffix sum of terms that cancel: a small element has the rounding errors of the largest ones after it
    assert_all_near(run_backward(pack), reference(pack), tolerance=3e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"gate_form": "bounded", "A_log": torch.full((2,), 100.0)},
        {"gate_form": "bounded", "A_log": None, "shift": 20.0},
        {"gate_form": "softplus", "A_log": torch.full((2,), 100.0)},
        {"gate_form": "softplus", "shift": 1e30},
    ],
    ids=["bounded A_log 100", "bounded raw +20", "softplus A_log 100", "softplus raw 1e30"],
)
def test_saturated_gates_have_finite_gradients(changes):
    shift = changes.get("shift", 0.0)
    pack = make_pack((66,), **{name: value for name, value in changes.items() if name != "shift"})
    pack.g.add_(shift)
    found, expected = run_backward(pack), reference(pack)
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), name
        if name in ("dq", "dk", "dv", "dbeta", "dinitial_state"):
            assert_all_near({name: tensor}, expected)


def test_softplus_far_below_zero():
    """dA_log of one token that carries a state of ones is e^g g: the gate itself, to 1e-6."""
    raw = torch.tensor([-7.0, -12.0, -18.0, -30.0])
    pack = make_pack((1,), HV=4, gate_form="softplus")
    ones = torch.ones_like(pack.initial_state)
    pack = replace(pack, A_log=torch.full((4,), 4.0), dt_bias=torch.zeros(4, 64), initial_state=ones, dfinal_state=ones)
    pack.g[:] = raw[:, None]
    pack.k.zero_(), pack.do.zero_()
    g = -torch.exp(torch.tensor(4.0).double()) * torch.log1p(torch.exp(raw.double()))
    expected = 64 * 64 * g.exp() * g
    assert ((run_backward(pack)["dA_log"].double() - expected) / expected).abs().max() <= 1e-6


def test_a_loss_of_a_prefix_does_not_see_what_follows():
    pack = make_pack((80,), dfinal_state=None, **FUSED)
    pack.do[21:] = 0.0
    expected = run_backward(pack)
    changed = replace(pack, **{name: getattr(pack, name).clone() for name in INPUTS})
    for name in INPUTS:
        getattr(changed, name)[21:] += 1.0
    found = run_backward(changed)
    for name in INPUTS:
        assert torch.equal(found["d" + name][:21], expected["d" + name][:21]), name
        assert not found["d" + name][21:].any(), name


def test_bits_do_not_depend_on_threads():
    pack = make_pack((65, 3, 64), H=2, HV=4, **FUSED)
    expected = run_backward(pack, num_threads=1)
    for num_threads in (2, 3, 40):
        assert_equal_bits(run_backward(pack, num_threads), expected)


def test_bits_do_not_depend_on_neighbours():
    pack = make_pack((5, 130, 0, 66), **FUSED)
    together = run_backward(pack)
    parameters = {"dA_log": 0.0, "ddt_bias": 0.0}
    for index in range(pack.documents):
        alone = run_backward(pack.document(index))
        rows = slice(pack.boundaries[index], pack.boundaries[index + 1])
        for name in INPUTS:
            assert torch.equal(alone["d" + name], together["d" + name][rows]), name
        assert torch.equal(alone["dinitial_state"][0], together["dinitial_state"][index])
        parameters = {name: total + alone[name] for name, total in parameters.items()}
    for name, total in parameters.items():
        assert torch.equal(together[name], total), f"{name} is the documents' sum, added in document order"


def test_strided_inputs():
    pack = make_pack((66, 4), dtype=torch.bfloat16, H=2, HV=2, **FUSED)
    views = {name: transposed(getattr(pack, name)) for name in (*INPUTS, "do")}
    assert not any(view.is_contiguous() for view in views.values())
    assert_equal_bits(run_backward(replace(pack, **views)), run_backward(pack))


def transposed(tensor):
    """The same values with the dimensions stored in reverse order."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def test_repeats_have_equal_bits():
    pack = make_pack((130, 7), H=1, HV=4, dtype=torch.bfloat16, **FUSED)
    expected = run_backward(pack)
    for _ in range(10):
        assert_equal_bits(run_backward(pack), expected)


REFUSALS = [
    ({"num_heads": 0}, "num_heads is 0; it must be at least 1"),
    ({"num_value_heads": 3}, "num_value_heads is 3; it must be a positive multiple of num_heads, which is 2"),
    ({"num_threads": -2}, "num_threads is -2"),
    ({"cu_seqlens": torch.tensor([0, 12, 8])}, "cu_seqlens decreases from 12 to 8 at document 1"),
    ({"v": None}, "v is null; the pack has 8 tokens"),
    ({"chunk_states": None}, "chunk_states is null"),
    ({"do_": None}, "do_ is null"),
    ({"dg": None}, "dg is null"),
    ({"workspace_bytes": 1039}, "workspace is a buffer of 1039 bytes; the parameter gradients need 1040"),
    ({"workspace": None}, "workspace is null of 1040 bytes"),
    ({"A_log": None, "gate_form": 2}, "dA_log is given, but gate_form is 2 and A_log is null"),
    ({"gate_form": 0}, "dA_log is given, but gate_form is 0 and A_log is given"),
    ({"dA_log": None, "dt_bias": None}, "ddt_bias is given, but gate_form is 1 and dt_bias is null"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[message.split(";")[0] for _, message in REFUSALS])
def test_refusals(changes, message):
    pack = make_pack((5, 3), H=2, HV=2, **FUSED)
    values, outputs = backward_values(pack, run_forward(pack)["chunk_states"])
    with pytest.raises(UnsupportedProblemError) as caught:
        launch(record_of("chunk_backward", pack), values | changes)
    assert message in str(caught.value)
    assert outputs["dq"].isnan().all(), "nothing runs after a refusal"
