"""``keep_decayed_qk``: a backward takes the decayed q and k that the forward had, and gives the same bits."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cake_kda_jit import KcpOptions, KdaOptions, UnsupportedProblemError, chunk_kda, last_launches, make_plan
from cake_kda_jit.bench.problems import make_problem, run
from cake_kda_jit.layers import KimiDeltaAttention
from cake_kda_jit.ops.forward import Context, kept_names, kept_tiles
from cake_kda_jit.ops.workspace import tile_bytes_per_head
from cake_kda_jit.programs.tile_fields import TILE_NAMES

KEPT = KdaOptions(backward="saved", keep_decayed_qk=True)
LENGTHS, HEADS, VALUE_HEADS, HEAD_DIM = (70, 0, 130, 1), 2, 4, 64
CHUNKS = 6


def programs() -> list[str]:
    return [launched.program for launched in last_launches()]


def attention(problem, segment_tokens, options=None) -> dict[str, torch.Tensor]:
    """Outputs and every gradient."""
    heads = {"num_heads": HEADS, "num_value_heads": VALUE_HEADS, "head_dim": HEAD_DIM}
    plan = make_plan(problem.cu_seqlens, **heads, device="cpu", segment_tokens=segment_tokens)

    def call(*inputs, cu_seqlens, **keywords):
        return chunk_kda(*inputs, plan=plan, options=options, **keywords)

    return run(call, problem, output_final_state=True)


@pytest.mark.parametrize("segment_tokens", [0, 64])
@pytest.mark.parametrize("with_state", [True, False])
def test_every_gradient_has_the_same_bits_and_nothing_is_prepared_again(with_state, segment_tokens, nan_poison):
    problem = make_problem(LENGTHS, heads=HEADS, value_heads=VALUE_HEADS, with_state=with_state)
    expected = attention(problem, segment_tokens)
    assert programs().count("chunk_prepare") == 1
    found = attention(problem, segment_tokens, KEPT)
    assert "chunk_prepare" not in programs()
    assert found.keys() == expected.keys() and len(found) == 9 + with_state
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_what_is_kept_is_no_scratch(nan_poison):
    """A limit for one group's dS and z, less than its tiles: two blocks of heads, in the forward one.

    A forward that keeps nothing needs room for the tiles.
    """
    problem = make_problem(LENGTHS, heads=HEADS, value_heads=VALUE_HEADS)
    per_head = tile_bytes_per_head(CHUNKS, HEAD_DIM, 4, states=1, values=1, kept=TILE_NAMES)
    assert per_head == CHUNKS * (64 * 64 + 64 * 64) * 4 < tile_bytes_per_head(CHUNKS, HEAD_DIM, 4, states=0, values=0)
    limit = per_head * VALUE_HEADS // HEADS
    found = attention(problem, 0, KdaOptions(keep_decayed_qk=True, workspace_limit=limit))
    assert programs().count("chunk_grad") == 2
    for name, tensor in attention(problem, 0).items():
        assert torch.equal(found[name], tensor), name
    with pytest.raises(UnsupportedProblemError, match=f"workspace_limit={limit} bytes is too small"):
        attention(problem, 0, KdaOptions(workspace_limit=limit))
    with torch.no_grad(), pytest.raises(UnsupportedProblemError, match=f"workspace_limit={limit} bytes is too small"):
        chunk_kda(
            *problem.inputs.values(),
            cu_seqlens=problem.cu_seqlens,
            options=KdaOptions(keep_decayed_qk=True, workspace_limit=limit),
            **problem.keywords,
        )


def test_names_of_what_each_mode_keeps():
    assert kept_names(None, 3) == kept_tiles(None) == ()
    assert kept_names(KdaOptions("replay"), 0) == ("Tinv", "checkpoints")
    assert kept_names(KdaOptions("saved"), 3) == ("Tinv", "Aqk", "h", "v_new", "M")
    assert set(kept_tiles(KEPT)) == set(TILE_NAMES)
    assert set(kept_names(KEPT, 3)) == {*TILE_NAMES, "h", "v_new", "M"}
    assert Context().tiles(None) == dict.fromkeys(TILE_NAMES)


def test_a_replay_that_the_environment_names_is_refused(monkeypatch):
    problem = make_problem((20,), with_state=False)
    monkeypatch.setenv("CAKE_KDA_JIT_BACKWARD", "replay")
    for _ in range(2):
        with pytest.raises(UnsupportedProblemError, match="set backward='saved', also where CAKE_KDA_JIT_BACKWARD"):
            chunk_kda(*problem.inputs.values(), options=KdaOptions(keep_decayed_qk=True), **problem.keywords)
    chunk_kda(*problem.inputs.values(), options=KEPT, **problem.keywords)


@pytest.mark.parametrize("options", [KEPT, KcpOptions(keep_decayed_qk=True)])
def test_options_are_pickled_and_copied(options):
    for other in (pickle.loads(pickle.dumps(options)), copy.deepcopy(options)):
        assert other == options and hash(other) == hash(options) and other.resolved().keep_decayed_qk


# ---- around a layer --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layer():
    torch.manual_seed(0)
    return KimiDeltaAttention(32, HEADS, HEAD_DIM)


@pytest.fixture(scope="module")
def plan():
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    return make_plan(cu_seqlens, num_heads=HEADS, head_dim=HEAD_DIM, device="cpu")


def gradients(layer, call, **keywords) -> list[torch.Tensor]:
    leaf = torch.randn(1, sum(LENGTHS), 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    layer.zero_grad()
    call(leaf, **keywords).square().sum().backward()
    return [leaf.grad, *(parameter.grad for parameter in layer.parameters())]


def assert_equal(found, expected) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_layer_passes_them_on(layer, plan):
    expected = gradients(layer, layer, plan=plan)
    assert "chunk_prepare" in programs()
    assert_equal(gradients(layer, layer, plan=plan, options=KEPT), expected)
    assert "chunk_prepare" not in programs()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed(layer, plan, use_reentrant):
    def recomputed(leaf):
        return checkpoint(lambda x: layer(x, plan=plan, options=KEPT), leaf, use_reentrant=use_reentrant)

    assert_equal(gradients(layer, recomputed), gradients(layer, layer, plan=plan))


def test_compiled(layer, plan):
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = gradients(layer, layer, plan=plan)
    assert_equal(gradients(layer, compiled, plan=plan, options=KEPT), expected)
    assert "chunk_prepare" not in programs()
    assert_equal(gradients(layer, compiled, plan=plan), expected)
    torch.compiler.reset()
