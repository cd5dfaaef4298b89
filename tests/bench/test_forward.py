"""The forward's and the step's bench: shapes, slices that results are checked on, peers recorded and not there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cake_kda_jit import KdaOptions, chunk_kda
from cake_kda_jit.bench import backward, forward, peers
from cake_kda_jit.bench.core import Row, Times
from cake_kda_jit.bench.problems import relative_error
from cake_kda_jit.errors import UnsupportedProblemError

CPU = torch.device("cpu")


def test_documents_of_a_shape():
    """Lengths by weights 1, 1.74, 2.48, 1.37, rounded down to 32; what is left goes to the last."""
    shape = forward.Shape.parse("32768,32,4,strong")
    boundaries = shape.boundaries()
    assert boundaries == [0, 4960, 13600, 25920, 32768]
    assert shape.name == "T 32768, H 32, 4 documents, strong gates"
    with pytest.raises(ValueError, match="'mild'; use strong or weak"):
        forward.Shape.parse("32768,32,4,mild")


@pytest.mark.parametrize("gates", ["strong", "weak"])
def test_our_arm_agrees_with_the_exact_slice(gates):
    """The slice is a prefix of the first document, so later tokens and other heads do not matter."""
    tensors, keywords = forward.make_inputs(forward.Shape.parse(f"320,3,2,{gates}"), CPU)
    arm = forward.our_arm(tensors, keywords)
    tokens = 96
    expected = forward.exact_slice(tensors, keywords, tokens)
    assert expected.shape == (tokens, 2, 128)
    assert relative_error(arm.run()[:tokens, [0, -1]], expected) < 2e-3  # o's rounding to bf16 is 1.7e-3
    assert "chunk_prepare" in arm.engine and "chunk_scan" in arm.engine
    assert arm.bytes == 320 * 3 * (forward.STATED_BYTES["chunk_prepare"] + forward.STATED_BYTES["chunk_scan"])


@pytest.mark.parametrize("mode", backward.MODES)
@pytest.mark.parametrize("gates", ["strong", "weak"])
def test_gradients_agree_with_the_exact_slice(gates, mode):
    """Behind the slice the document goes on, with an output gradient of 0."""
    tensors, keywords = forward.make_inputs(forward.Shape.parse(f"330,2,1,{gates}"), CPU)
    error = backward.gradient_error(backward.our_call(tensors, keywords, backward.MODES[mode]), 200)
    assert 1e-3 < error < 3e-3  # the gradients' rounding to bf16 is 1.7e-3; a few of a gate cancel
    assert all(tensor.grad is None for tensor in tensors)


def test_a_step_that_keeps_the_decayed_q_and_k_states_no_second_preparation():
    """Per token-head at K = 128: q, k, g and beta are 770 bytes, ke, qg and kg 768, decay_total 8."""
    saved, kept = (backward.stated_bytes(mode)["chunk_prepare"] for mode in ("saved", "saved+qk"))
    assert saved - kept == 770 + 768 + 8 and kept == forward.STATED_BYTES["chunk_prepare"]


def test_a_wrong_gradient_is_seen():
    tensors, keywords = forward.make_inputs(forward.Shape.parse("64,2,1,strong"), CPU)
    call = backward.our_call(tensors, keywords, KdaOptions())
    wrong = replace(call, run=lambda *inputs: Twice.apply(call.run(*inputs)))
    assert backward.gradient_error(wrong, 64) > 0.9


class Twice(torch.autograd.Function):
    """The identity, whose gradient is wrong."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return 2 * dx


def fake_cudnn(q, k, v, g, beta, cu_seqlens, **options):
    """cuDNN's signature: no batch, its own names; computed by chunk_kda."""
    names = {"safe_gate": "use_gate_in_kernel", "gate_lower_bound": "lower_bound", "a_log": "A_log"}
    given = {names.get(name, name): value for name, value in options.items()}
    return [o[0] for o in chunk_kda(*(x[None] for x in (q, k, v, g, beta)), cu_seqlens=cu_seqlens, **given)[:1]]


def fake_fla(*inputs, cu_seqlens_cpu, safe_gate, **keywords):
    assert cu_seqlens_cpu.device == CPU and safe_gate == ("lower_bound" in keywords)
    return chunk_kda(*inputs, **keywords)


@pytest.mark.parametrize("gates", ["strong", "weak"])
@pytest.mark.parametrize(("peer", "arms"), [("cudnn", ["cudnn fused", "cudnn prepared"]), ("fla", ["fla"])])
def test_adapters_give_each_peer_the_same_problem(peer, arms, gates, monkeypatch):
    """With chunk_kda behind their signatures: o of each arm, and every gradient against what its inputs ask for."""
    module = SimpleNamespace(kimi_delta_attention=fake_cudnn, chunk_kda=fake_fla)
    monkeypatch.setattr(peers, "load", lambda *_: (module, "1.2"))
    shape = forward.Shape.parse(f"200,2,2,{gates}")
    tensors, keywords = forward.make_inputs(shape, CPU)
    expected = forward.our_arm(tensors, keywords).run()
    calls = peers.make_calls([peer], tensors, keywords, shape.boundaries())
    assert list(calls) == arms
    for name, call in calls.items():
        assert call.library.endswith("1.2")
        # Prepared q and k are rounded to bf16 once more.
        assert relative_error(call.run(*call.inputs).detach(), expected.double()) < 4e-3, name
        assert backward.gradient_error(call, shape.boundaries()[1]) < 3e-3, name
        backward.make_step(call)()
        assert all(leaf.grad is None for leaf in (*call.inputs, *call.parameters))
    assert not any(tensor.requires_grad for tensor in tensors)


@pytest.mark.parametrize(("module", "what"), [(forward, peers.FORWARD), (backward, peers.STEP)])
def test_recorded_figures_stand_beside_every_shape(module, what, capsys):
    """Each default shape has at least one; an arm that runs now is left out."""
    for shape in map(forward.Shape.parse, module.SHAPES):
        rows = peers.recorded_rows(what, shape.name)
        assert rows and all(row.arm.endswith("(recorded)") and "recorded 20" in row.engine for row in rows)
        assert all(row.ms.min is None and row.error is None and row.ms.median > 0 for row in rows)
        left = peers.recorded_rows(what, shape.name, ["cudnn prepared"])
        assert [row.arm for row in left] == [row.arm for row in rows if row.arm != "cudnn prepared (recorded)"]
        module.print_rows(
            shape, [Row(shape.name, "ours", "x", Times(rows[0].ms.median / 2, 1.0, 1.0, 3), 8, 1e-3), *rows]
        )
        [line] = (line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {rows[0].arm} "))
        assert "| 2.00 |" in line


def test_an_installed_package_has_no_recorded_figures(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "RECORDED", tmp_path / "none.json")
    assert peers.recorded_rows(peers.FORWARD, forward.Shape.parse(forward.SHAPES[0]).name) == []


@pytest.mark.parametrize("peer", peers.PACKAGES)
def test_a_peer_that_is_not_installed_is_refused_by_name(peer, monkeypatch):
    def absent(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(peers, "import_module", absent)
    tensors, keywords = forward.make_inputs(forward.Shape.parse("64,1,1,strong"), CPU)
    with pytest.raises(
        UnsupportedProblemError, match=rf"--peers {peer}: .*No module named.*install {peers.PACKAGES[peer][0]}=="
    ):
        peers.make_calls([peer], tensors, keywords, [0, 64])


def test_an_unknown_peer_is_refused(capsys):
    with pytest.raises(SystemExit):
        forward.main(["--peers", "fla,flashier"])
    assert "--peers names flashier; there are fla, cudnn" in capsys.readouterr().err
