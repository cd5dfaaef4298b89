"""Chunk form and hand-written backward against the recurrence and its autograd gradients, in FP64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cake_kda_jit.reference import chunk_kda_reference, chunk_kda_reference_backward

from .problems import assert_gradients_near, assert_near, autograd_gradients, make_problem

PACKS = {
    "one token": [0, 1],
    "short, empty, one-token, whole and partial chunks": [0, 0, 3, 4, 68, 68, 133, 202, 202],
    "chunk edges": [0, 63, 127, 192],
}
FORMS = {
    "ready": {},
    "softplus": {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True},
    "bounded": {
        "use_gate_in_kernel": True,
        "lower_bound": -5.0,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "use_qk_l2norm_in_kernel": True,
        "scale": 0.3,
    },
    "state_v_first": {"state_v_first": True},
}


def backward(problem):
    return chunk_kda_reference_backward(
        *problem.inputs, do=problem.do, dfinal_state=problem.dfinal_state, **problem.keywords
    )


def check(problem):
    o, final_state = problem.forward()
    o_chunk, final_chunk = problem.forward(chunk_kda_reference)
    assert_near(o_chunk, o)
    assert_near(final_chunk, final_state)
    assert_gradients_near(backward(problem), autograd_gradients(problem))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pack", PACKS)
def test_forms_and_packs(pack, form):
    check(make_problem(PACKS[pack], **FORMS[form]))


@pytest.mark.parametrize(("H", "HV"), [(1, 1), (3, 3), (1, 3)])
def test_head_groups(H, HV):
    check(make_problem([0, 70, 75], H=H, HV=HV, **FORMS["softplus"]))


def test_absent_states_are_zero_states():
    problem = make_problem([0, 66, 70])
    with torch.no_grad():
        problem.keywords["initial_state"].zero_()
    problem.dfinal_state.zero_()
    expected = autograd_gradients(problem)
    problem.keywords["initial_state"] = None
    assert_near(problem.forward(chunk_kda_reference)[0], problem.forward()[0])
    gradients = chunk_kda_reference_backward(*problem.inputs, do=problem.do, **problem.keywords)
    assert_gradients_near(gradients, expected)


def test_bounded_gate_without_parameters():
    problem = make_problem([0, 65], use_gate_in_kernel=True, lower_bound=-2.0)
    problem.keywords.update(A_log=None, dt_bias=None)
    problem.leaves[6:] = [None, None]
    check(problem)


def test_batched_rows():
    problem = make_problem([0, 66, 132])
    batched = [x.detach().reshape(2, 66, *x.shape[2:]) for x in problem.inputs]
    keywords = {**problem.keywords, "cu_seqlens": None}
    o, final_state = chunk_kda_reference(*batched, **keywords)
    packed_o, packed_final = problem.forward(chunk_kda_reference)
    assert torch.equal(o.reshape(packed_o.shape), packed_o)
    assert torch.equal(final_state, packed_final)
    do = problem.do.reshape(2, 66, 4, 6)
    gradients = chunk_kda_reference_backward(*batched, do=do, dfinal_state=problem.dfinal_state, **keywords)
    packed = backward(problem)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(getattr(gradients, name).reshape(getattr(packed, name).shape), getattr(packed, name))


@pytest.mark.parametrize("gates", ["one token", "some channels", "first and last", "all", "-30", "-400"])
def test_hard_resets_and_strong_gates_inside_chunks(gates):
    problem = make_problem([0, 3, 100, 150])
    g = problem.inputs[3]
    with torch.no_grad():
        if gates == "one token":
            g[0, 40] = -torch.inf
        elif gates == "some channels":
            g[0, 20:120, :, ::3] = -torch.inf
            g[0, 60, 1] = -torch.inf
        elif gates == "first and last":
            g[0, [0, 2, 3, 66, 67, 99, 100, 149]] = -torch.inf
        elif gates == "all":
            g[:] = -torch.inf
        else:
            g[:] = float(gates)
    check(problem)


def test_after_a_reset_the_past_is_gone_exactly():
    problem = make_problem([0, 64], HV=2)
    with torch.no_grad():
        problem.inputs[3][0, 20] = -torch.inf
    changed = [x.detach().clone() for x in problem.inputs]
    for x in changed[:3]:
        x[:, :20] *= 3.0
    o, _ = problem.forward(chunk_kda_reference)
    o_changed, _ = chunk_kda_reference(*changed, **problem.keywords)
    assert not torch.equal(o_changed[:, :20], o[:, :20])
    assert_near(o_changed[:, 20:], o[:, 20:], 1e-15)


def test_a_later_token_changes_no_earlier_output():
    problem = make_problem([0, 130], **FORMS["softplus"])
    o, _ = problem.forward(chunk_kda_reference)
    changed = [x.detach().clone() for x in problem.inputs]
    for x in changed:
        x[:, 75:] += 1.0
    o_changed, _ = chunk_kda_reference(*changed, **problem.keywords)
    assert_near(o_changed[:, :75], o[:, :75], 1e-15)


@pytest.mark.parametrize("form", ["ready", "softplus", "bounded"])
def test_one_token_documents_without_state_have_no_gate_gradient(form):
    problem = make_problem(list(range(9)), state=False, **FORMS[form])
    gradients = backward(problem)
    assert torch.count_nonzero(gradients.dg) == 0
    assert torch.count_nonzero(gradients.dq) > 0
    for name in ("dA_log", "ddt_bias"):
        parameter = getattr(gradients, name)
        assert parameter is None or torch.count_nonzero(parameter) == 0


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_saturated_gates_have_finite_gradients(lower_bound):
    problem = make_problem([0, 3, 70], use_gate_in_kernel=True, lower_bound=lower_bound)
    with torch.no_grad():
        problem.keywords["A_log"].fill_(100.0)
        problem.inputs[3][0, 5] = 20.0
    check(problem)


def test_correlated_keys_near_unit_beta():
    problem = make_problem([0, 150], H=1, HV=1, K=16)
    with torch.no_grad():
        q, k, v, g, beta = problem.inputs
        direction = torch.randn(16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        k.copy_(torch.nn.functional.normalize(0.9 * direction / direction.norm() + 0.43 * k, dim=-1))
        beta.fill_(0.95)
        g.mul_(0.01)
    check(problem)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 5, 17, 63, 64, 65, 80]), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
    form=st.sampled_from(sorted(FORMS)),
)
def test_any_pack(lengths, seed, form):
    cu_seqlens = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    check(make_problem(cu_seqlens, HV=2, K=4, V=4, seed=seed, **FORMS[form]))


def test_builds_no_graph_and_refuses_unknown_keywords():
    problem = make_problem([0, 5])
    o, final_state = problem.forward(chunk_kda_reference)
    assert not o.requires_grad and not final_state.requires_grad
    with pytest.raises(TypeError, match="chunk_size"):
        chunk_kda_reference(*problem.inputs, chunk_size=32)
