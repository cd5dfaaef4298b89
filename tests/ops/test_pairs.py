"""Every pair of options of chunk_kda at least once, each call against FP64; the covering set is tested itself."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

from cake_kda_jit import KdaOptions, UnsupportedProblemError, chunk_kda, last_launches, make_plan
from cake_kda_jit.bench import pairs, problems
from cake_kda_jit.bench.precision import parameter_errors
from cake_kda_jit.bench.problems import BUDGETS, LOCAL_FACTOR, NAMES, PARAMETER_BUDGET, Problem, make_problem
from cake_kda_jit.ops.forward import kept_tiles
from cake_kda_jit.ops.workspace import tile_bytes_per_head
from cake_kda_jit.reference import recurrent_kda

ROWS = pairs.covering_rows()
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LENGTHS, BATCH = (66, 0, 1, 20), (2, 66)  # two chunks, or two segments of 64, in the longest document
HEADS = 2


def test_every_possible_pair_is_in_a_row():
    wanted = pairs.all_pairs(pairs.OPTIONS, pairs.is_possible)
    found = set().union(*(pairs.pairs_of(row) for row in ROWS))
    assert not set(wanted) - found
    assert all(pairs.is_possible(row) and list(row) == list(pairs.OPTIONS) for row in ROWS)


def test_impossible_pairs_are_the_only_ones_left_out():
    every = sum(len(a) * len(b) for a, b in itertools.combinations(pairs.OPTIONS.values(), 2))
    # ready with dt_bias; batched with a plan's two values of segment_tokens
    assert len(pairs.all_pairs(pairs.OPTIONS, pairs.is_possible)) == every - 3


def test_the_pairs_left_out_are_refused():
    inputs = make_problem((20,), with_state=False).inputs
    with pytest.raises(UnsupportedProblemError, match="dt_bias is given but use_gate_in_kernel is False"):
        chunk_kda(**inputs, dt_bias=torch.zeros(128))
    plan = make_plan(torch.tensor([0, 20]), num_heads=2, head_dim=64, device="cpu", segment_tokens=64)
    twice = {name: tensor.repeat(2, *[1] * (tensor.dim() - 1)) for name, tensor in inputs.items()}
    with pytest.raises(UnsupportedProblemError, match="B = 2 with cu_seqlens or a plan"):
        chunk_kda(**twice, plan=plan)


def test_the_covering_set_is_small_and_the_same_in_every_run():
    # Two options of 4 and 3 values alone need 12 rows.
    assert 12 <= len(ROWS) <= 24 and pairs.covering_rows() == ROWS


@pytest.mark.parametrize("values", [(2, 2), (2, 2, 2), (3, 2, 4), (3, 3, 3, 3, 3, 2, 2)])
def test_the_greedy_covers_any_options(values):
    options = {f"option {index}": tuple(range(count)) for index, count in enumerate(values)}
    rows = pairs.covering_rows(options, lambda row: True)
    found = set().union(*(pairs.pairs_of(row) for row in rows))
    assert found == set(pairs.all_pairs(options, lambda row: True))
    assert len(rows) <= 2 * max(a * b for a, b in itertools.combinations(values, 2))


# ---- the calls -------------------------------------------------------------------------------------------------------


def problem_of(row: pairs.Row, seed: int) -> tuple[Problem, str]:
    """The row's inputs and keywords that change values, and the regime whose budgets hold."""
    regime = "bounded" if row["gate"].startswith("bounded") else "softplus"
    problem = make_problem(
        LENGTHS,
        regime=regime,
        heads=HEADS,
        value_heads=HEADS * row["group"],
        head_dim=row["head_dim"],
        dtype=torch.float32,
        seed=seed,
        with_state=row["initial_state"],
        batch=BATCH if row["layout"] == "batched" else None,
    )
    inputs, keywords = problem.inputs, problem.keywords
    if row["gate"] == "ready":
        inputs["g"] = -inputs["g"].abs()
        del keywords["A_log"]
    if row["gate"] == "bounded, no A_log":
        keywords["A_log"] = None
    if not row["dt_bias"]:
        shift = keywords.pop("dt_bias")
        if row["gate"] == "softplus":
            inputs["g"] = inputs["g"] + shift.mean()
    keywords["use_gate_in_kernel"] = row["gate"] != "ready"
    if not row["l2norm"]:  # the delta rule needs keys of norm 1
        inputs |= {name: normalize(inputs[name], dim=-1) for name in ("q", "k")}
    keywords["use_qk_l2norm_in_kernel"] = row["l2norm"]
    if row["beta"] == "ready":
        inputs["beta"] = torch.sigmoid(inputs["beta"])
    keywords["use_beta_sigmoid_in_kernel"] = row["beta"] != "ready"
    keywords["allow_neg_eigval"] = row["beta"] == "two_sigmoid"
    keywords["state_v_first"] = row["state_v_first"]
    if row["scale"] != "default":
        keywords["scale"] = row["scale"]
    for name in NAMES:
        keeps_fp32 = row.get(f"{name} dtype") == "fp32"
        inputs[name] = inputs[name] if keeps_fp32 else inputs[name].to(DTYPES[row["dtype"]])
    return problem, regime


def sliced(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between rows and between channels."""
    wide = torch.nn.functional.pad(tensor, (1, 2) * min(2, tensor.dim() - 2), value=torch.nan)
    wide = torch.stack([wide, wide], dim=-1)[..., 0]
    return wide[..., 1:-2, 1:-2] if tensor.dim() == 4 else wide[..., 1:-2]


def run_with(function, problem: Problem, row: pairs.Row, dtype=None, **extra) -> dict[str, torch.Tensor]:
    """Forward and backward as ``problems.run``, with the row's strides and use of the final state."""
    leaves = {
        name: (tensor if dtype is None else tensor.to(dtype)).detach().clone().requires_grad_()
        for name, tensor in problem.leaves().items()
    }
    keywords = {**problem.keywords, **{n: t for n, t in leaves.items() if n not in NAMES}, **extra}
    inputs = [sliced(leaves[name]) if row["strides"] == "sliced" else leaves[name] for name in NAMES]
    o, final_state = function(*inputs, cu_seqlens=problem.cu_seqlens, **keywords)
    generator = torch.Generator().manual_seed(99)
    do = torch.randn(o.shape, generator=generator).to(problem.inputs["q"].dtype)
    outputs, gradients = [o], [do.to(o)]
    if row["final_state"] == "output and gradient":
        outputs.append(final_state)
        gradients.append(torch.randn(final_state.shape, generator=generator).to(final_state))
    torch.autograd.backward(outputs, gradients)
    found = {"o": o.detach()}
    if final_state is not None:
        found["final_state"] = final_state.detach()
    return found | {"d" + name: leaf.grad for name, leaf in leaves.items()}


def options_of(row: pairs.Row, problem: Problem) -> dict[str, object]:
    """The row's options and plan, as keywords of ``chunk_kda``."""
    backward, *more = row["backward"].split(" and ")
    options = KdaOptions(backward, row["checkpoint_tokens"], keep_decayed_qk=bool(more))
    if row["workspace_limit"] == "one group":
        lengths = [BATCH[1]] * BATCH[0] if row["layout"] == "batched" else LENGTHS
        chunks = sum(-(-length // 64) for length in lengths)
        # What the backward needs: dS and z, and h and v' once more where it replays.
        tensors = 1 + (backward == "replay")
        per_head = tile_bytes_per_head(
            chunks, row["head_dim"], 4, states=tensors, values=tensors, kept=kept_tiles(options)
        )
        options = replace(options, workspace_limit=row["group"] * per_head)
    keywords = {"options": options, "output_final_state": row["final_state"] != "no"}
    if row["segment_tokens"] != "by rule":
        keywords["plan"] = make_plan(
            problem.cu_seqlens,
            num_heads=HEADS,
            num_value_heads=HEADS * row["group"],
            head_dim=row["head_dim"],
            device="cpu",
            segment_tokens=row["segment_tokens"],
        )
    return keywords


@pytest.fixture
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("index", range(len(ROWS)))
def test_call_of_the_covering_set_against_fp64(index, one_torch_thread, nan_poison):
    row = ROWS[index]
    problem, regime = problem_of(row, seed=index)
    found = run_with(chunk_kda, problem, row, **options_of(row, problem))
    if row["workspace_limit"] == "one group":
        assert sum(launched.program == "chunk_grad" for launched in last_launches()) == HEADS
    expected = run_with(recurrent_kda, problem, row, dtype=torch.float64)
    assert ("final_state" in found) == (row["final_state"] != "no")
    for name, tensor in found.items():
        assert tensor.isfinite().all(), name
        if name in ("dA_log", "ddt_bias"):
            continue
        leaf = problem.leaves().get(name[1:])
        assert leaf is None or tensor.dtype == leaf.dtype
        budget = BUDGETS[regime]["final_state" if name == "dinitial_state" else name]
        if row["dtype"] == "fp32":
            budget = 2e-5  # the arithmetic alone: sums of 64 products, decays of 1e-7 each
        assert problems.relative_error(tensor, expected[name]) <= budget, name
        for document, head, error in problems.local_errors(name, tensor, expected[name], problem):
            assert error <= LOCAL_FACTOR * budget, (name, document, head)
    if "ddt_bias" in found and "dA_log" in found:
        assert max(parameter_errors(found, expected, problem)) <= PARAMETER_BUDGET
    for name in {"dA_log", "ddt_bias"} & set(found):
        assert problems.relative_error(found[name], expected[name]) < 1e-2, name
