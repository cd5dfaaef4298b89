"""The definition itself: against a scalar loop, and what packing, grouping, layout and resets must mean."""

import pytest
import torch

from cake_kda_jit.reference import recurrence, recurrent_kda

from .problems import assert_near, autograd_gradients, make_problem


def one_head(q, k, v, g, beta, S, scale):
    """The four lines of the definition for one document and head: q, k, g `[T, K]`, v `[T, V]`, beta `[T]`."""
    outputs = []
    for t in range(len(q)):
        S = torch.diag(torch.exp(g[t])) @ S
        u = beta[t] * (v[t] - S.T @ k[t])
        S = S + torch.outer(k[t], u)
        outputs.append(scale * (S.T @ q[t]))
    return torch.stack(outputs) if outputs else v[:0], S


@pytest.mark.parametrize("scale", [None, 0.37])
def test_four_lines_per_head_and_document(scale):
    cu = [0, 0, 5, 6, 6, 13, 13]
    problem = make_problem(cu, scale=scale)
    o, final_state = problem.forward()
    q, k, v, g, beta = (x.detach()[0] for x in problem.inputs)
    for n, (start, end) in enumerate(zip(cu, cu[1:])):
        for hv in range(4):
            h, rows = hv // 2, slice(start, end)
            S = problem.keywords["initial_state"].detach()[n, hv]
            expected, S = one_head(
                q[rows, h], k[rows, h], v[rows, hv], g[rows, hv], beta[rows, hv], S, scale or 8**-0.5
            )
            assert_near(o[0, rows, hv], expected)
            assert_near(final_state[n, hv], S)


def test_a_batch_is_a_pack_of_equal_documents():
    problem = make_problem([0, 7, 14, 21])
    o, final_state = problem.forward()
    batched = [x.reshape(3, 7, *x.shape[2:]) for x in problem.inputs]
    o_batched, final_batched = recurrent_kda(*batched, initial_state=problem.keywords["initial_state"])
    assert torch.equal(o_batched.reshape(o.shape), o)
    assert torch.equal(final_batched, final_state)


def test_cu_seqlens_may_be_a_tensor_and_neighbours_change_nothing():
    problem = make_problem([0, 4, 9, 40])
    o, final_state = problem.forward()
    for dtype in (torch.int32, torch.int64):
        problem.keywords["cu_seqlens"] = torch.tensor([0, 4, 9, 40], dtype=dtype)
        assert torch.equal(problem.forward()[0], o)
    alone = [x[:, 4:9] for x in problem.inputs]
    o_alone, final_alone = recurrent_kda(*alone, initial_state=problem.keywords["initial_state"][1:2])
    assert_near(o[:, 4:9], o_alone, 1e-15)
    assert_near(final_state[1:2], final_alone, 1e-15)


def test_empty_documents_pass_their_state_and_its_gradient():
    for cu in ([0, 0], [0, 0, 3, 3]):
        problem = make_problem(cu)
        _, final_state = problem.forward()
        initial_state = problem.keywords["initial_state"]
        assert torch.equal(final_state[0], initial_state[0])
        assert torch.equal(autograd_gradients(problem)["dinitial_state"][0], problem.dfinal_state[0])
    without = make_problem([0, 0, 2], state=False)
    assert torch.equal(without.forward()[1][0], torch.zeros(4, 8, 6, dtype=torch.float64))


def test_state_v_first_turns_both_states():
    problem = make_problem([0, 3, 9])
    o, final_state = problem.forward()
    problem.keywords.update(initial_state=problem.keywords["initial_state"].mT, state_v_first=True)
    o_turned, final_turned = problem.forward()
    assert torch.equal(o_turned, o)
    assert torch.equal(final_turned.mT, final_state)


def test_grouped_heads_are_repeated_heads():
    problem = make_problem([0, 6])
    q, k, v, g, beta = problem.inputs
    repeated = [q.repeat_interleave(2, dim=2), k.repeat_interleave(2, dim=2), v, g, beta]
    assert torch.equal(recurrent_kda(*repeated, **problem.keywords)[0], problem.forward()[0])


def test_hard_reset_forgets_exactly():
    problem = make_problem([0, 9])
    g = problem.inputs[3]
    with torch.no_grad():
        g[0, 5] = -torch.inf
    o, _ = problem.forward()
    rest = [x[:, 5:] for x in problem.inputs]
    assert_near(o[:, 5:], recurrent_kda(*rest)[0], 1e-15)
    gradients = autograd_gradients(problem)
    assert all(torch.isfinite(x).all() for x in gradients.values())
    assert torch.equal(gradients["dg"][0, 5], torch.zeros(4, 8, dtype=torch.float64))


def test_recomputing_stretches_changes_no_gradient(monkeypatch):
    problem = make_problem([0, 40, 43, 110], HV=2)
    kept = autograd_gradients(problem)
    monkeypatch.setattr(recurrence, "RECOMPUTE_ABOVE", 0)
    recomputed = autograd_gradients(problem)
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


def test_every_input_passes_gradcheck():
    problem = make_problem(
        [0, 2, 2, 5],
        H=1,
        HV=2,
        K=2,
        V=2,
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )

    def call(q, k, v, g, beta, initial_state, A_log, dt_bias):
        keywords = {**problem.keywords, "initial_state": initial_state, "A_log": A_log, "dt_bias": dt_bias}
        return recurrent_kda(q, k, v, g, beta, **keywords)

    assert torch.autograd.gradcheck(call, problem.leaves)


def test_dtype_computed_in():
    problem = make_problem([0, 5])
    low = [x.detach().bfloat16() for x in problem.inputs]
    state = problem.keywords["initial_state"].detach().float()
    assert recurrent_kda(*low)[0].dtype == torch.bfloat16
    assert recurrent_kda(*low, initial_state=state)[0].dtype == torch.float32
    o, _ = recurrent_kda(*low, initial_state=state, dtype=torch.float64)
    assert torch.equal(o, recurrent_kda(*(x.double() for x in low), initial_state=state.double())[0])


def test_refusals_name_what_was_given():
    problem = make_problem([0, 5])
    q, k, v, g, beta = problem.inputs
    with pytest.raises(TypeError, match="cu_seqlen"):
        recurrent_kda(q, k, v, g, beta, cu_seqlen=[0, 5])
    with pytest.raises(ValueError, match="multiple of H"):
        recurrent_kda(q, k, v[:, :, :3], g[:, :, :3], beta[:, :, :3])
    with pytest.raises(ValueError, match=r"g \[B, T, HV, K\]"):
        recurrent_kda(q, k, v, g[..., 0], beta)
    with pytest.raises(ValueError, match=r"q, k \[B, T, H, K\]"):
        recurrent_kda(q, k[:, :4], v, g, beta)
    for cu in ([], [1, 5], [0, 4], [0, 4, 3, 5]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            recurrent_kda(q, k, v, g, beta, cu_seqlens=cu)
    with pytest.raises(ValueError, match="batch size is 2"):
        recurrent_kda(*(torch.cat([x, x]) for x in problem.inputs), cu_seqlens=[0, 5])
    with pytest.raises(ValueError, match="initial_state"):
        recurrent_kda(q, k, v, g, beta, initial_state=torch.zeros(2, 4, 8, 6))
