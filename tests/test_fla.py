"""The drop-in: flash-linear-attention's own KDA tests at half their tolerances, and every argument of theirs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

import cake_kda_jit
from cake_kda_jit import KcpContext, Partition, UnsupportedProblemError, VirtualGroup, fla, last_launches
from cake_kda_jit.reference import causal_conv1d_reference, recurrent_kda

# Half of what their tests allow, as a ratio of root mean squares: o and states 0.005, dq, dk, dv and dh0 0.008 (0.007
# with documents), ddt_bias 0.005, dg and dbeta 0.02 (0.015), dA_log 0.003. All of it is rounding of 16-bit numbers.
TOLERANCES = {"o": 0.0025, "ht": 0.0025, "q": 0.004, "k": 0.004, "v": 0.004, "h0": 0.004, "g": 0.01, "beta": 0.01}
VARLEN_TOLERANCES = TOLERANCES | {"q": 0.0035, "v": 0.0035, "h0": 0.0035, "g": 0.0075, "beta": 0.0075}
PARAMETER_TOLERANCES = {"A_log": 0.0015, "dt_bias": 0.0025}


@dataclass(frozen=True)
class Case:
    """One call: sizes as in their tests, the gate's scale, the share of hard resets, and options."""

    tokens: int
    heads: int
    value_heads: int
    head_dim: int
    batch: int = 1
    dtype: torch.dtype = torch.float16
    normalizer: float = 1.0
    cu_seqlens: tuple[int, ...] | None = None
    resets: float = 0.0
    gate_in_kernel: bool = False
    options: tuple[tuple[str, object], ...] = ()

    def keywords(self) -> dict[str, object]:
        return dict(self.options)


DENSE = [
    Case(63, 1, 1, 64, batch=1, gate_in_kernel=True),
    Case(160, 2, 2, 128, batch=2, normalizer=0.1),
    Case(500, 3, 3, 64, options=(("chunk_size", 32),)),
    Case(1000, 2, 4, 64, normalizer=0.1, gate_in_kernel=True),
    Case(1024, 2, 8, 64, normalizer=10.0, dtype=torch.bfloat16, options=(("disable_recompute", True),)),
    Case(500, 2, 2, 128, gate_in_kernel=True, options=(("safe_gate", True), ("lower_bound", -5.0))),
    Case(1500, 1, 1, 128, normalizer=10.0, options=(("state_v_first", True),)),
]
VARLEN = [
    Case(15, 2, 2, 64, cu_seqlens=(0, 15), resets=0.1),
    Case(1000, 4, 4, 64, cu_seqlens=(0, 256, 500, 1000), resets=0.9, gate_in_kernel=True),
    Case(160, 2, 4, 128, cu_seqlens=(0, 31, 96, 160), resets=0.5, options=(("use_graph", True), ("max_num_seqs", 5))),
    Case(2000, 2, 2, 128, cu_seqlens=(0, 15, 100, 300, 1200, 2000), resets=0.5, dtype=torch.bfloat16),
]


def leaves_of(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(42)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    B, T, H, HV, D = case.batch, case.tokens, case.heads, case.value_heads, case.head_dim
    documents = case.keywords().get("max_num_seqs", len(case.cu_seqlens) - 1 if case.cu_seqlens else B)
    g = normal(B, T, HV, D)
    if not case.gate_in_kernel:
        g = functional.logsigmoid(g) / case.normalizer
        g = g.masked_fill(torch.rand(g.shape, generator=generator) < case.resets, -1000.0)
    leaves = {
        "q": normal(B, T, H, D),
        "k": normal(B, T, H, D),
        "v": normal(B, T, HV, D),
        "g": g,
        "beta": normal(B, T, HV).sigmoid(),
    }
    leaves = {name: tensor.to(case.dtype) for name, tensor in leaves.items()}
    leaves["g"] = g.float() if case.resets else leaves["g"]  # -1000 is finite in fp16, its chunk's sums are not
    leaves["h0"] = normal(documents, HV, D, D)
    if case.gate_in_kernel:
        leaves["A_log"] = torch.empty(HV).uniform_(0, 2, generator=generator)
        leaves["dt_bias"] = normal(HV * D)
    return leaves


def run(function, case: Case, leaves: dict[str, torch.Tensor], cu_seqlens, **keywords) -> dict[str, torch.Tensor]:
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in leaves.items()}
    inputs = {"initial_state" if name == "h0" else name: tensor for name, tensor in leaves.items()}
    o, ht = function(
        **inputs,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=case.gate_in_kernel,
        cu_seqlens=cu_seqlens,
        **keywords,
    )
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(o.shape, generator=generator).to(o.dtype)
    dht = torch.randn(ht.shape, generator=generator).to(ht.dtype)
    torch.autograd.backward([o, ht], [do, dht])
    return {"o": o.detach(), "ht": ht.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def reference(case: Case, leaves: dict[str, torch.Tensor], cu_seqlens) -> dict[str, torch.Tensor]:
    theirs_alone = ("chunk_size", "disable_recompute", "use_graph", "max_num_seqs")
    keywords = {name: value for name, value in case.keywords().items() if name not in theirs_alone}
    exact = {name: tensor.double() for name, tensor in leaves.items()}
    return run(recurrent_kda, case, exact, cu_seqlens, **keywords)


@pytest.mark.parametrize("case", [*DENSE, *VARLEN], ids=lambda case: f"T{case.tokens}-HV{case.value_heads}")
def test_their_own_cases(case):
    leaves = leaves_of(case)
    cu_seqlens = None
    if case.cu_seqlens is not None:
        missing = leaves["h0"].shape[0] + 1 - len(case.cu_seqlens)
        cu_seqlens = torch.tensor([*case.cu_seqlens, *[case.tokens] * missing])
    found = run(fla.chunk_kda, case, leaves, cu_seqlens, output_final_state=True, **case.keywords())
    expected = reference(case, leaves, cu_seqlens)
    tolerances = (VARLEN_TOLERANCES if case.cu_seqlens else TOLERANCES) | PARAMETER_TOLERANCES
    for name, tensor in found.items():
        error = (tensor.double() - expected[name]).square().mean().sqrt() / expected[name].square().mean().sqrt()
        assert error <= tolerances[name], f"{name}: {error:.1e}"


@pytest.mark.parametrize("head_dim", [60, 100, 256])
def test_their_other_head_sizes_are_refused_by_name(head_dim):
    leaves = leaves_of(Case(63, 1, 1, head_dim))
    with pytest.raises(UnsupportedProblemError, match=f"K = {head_dim} and V = {head_dim}"):
        fla.chunk_kda(*(leaves[name] for name in ("q", "k", "v", "g", "beta")))


def test_signatures():
    """Their names in their order, so that positional calls mean the same; the rest is what they read from **kwargs."""
    assert (
        list(inspect.signature(fla.chunk_kda).parameters)
        == (
            "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
            "use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute "
            "return_intermediate_states state_v_first cu_seqlens cu_seqlens_cpu cp_context use_graph max_num_seqs "
            "A_log dt_bias chunk_size transpose_state_layout"
        ).split()
    )
    assert (
        list(inspect.signature(fla.causal_conv1d).parameters)
        == (
            "x weight bias residual initial_state output_final_state activation backend cu_seqlens cu_seqlens_cpu "
            "chunk_indices cp_context seq_idx"
        ).split()
    )
    ours = set(inspect.signature(cake_kda_jit.chunk_kda).parameters)
    assert ours - set(inspect.signature(fla.chunk_kda).parameters) == {"plan", "options"}


def test_recomputation_is_our_choice_of_backward():
    leaves = leaves_of(Case(70, 1, 1, 64))
    inputs = [leaves[name].requires_grad_() for name in ("q", "k", "v", "g", "beta")]
    gradients = []
    for disable_recompute in (False, True):
        o, _ = fla.chunk_kda(*inputs, disable_recompute=disable_recompute)
        gradients.append(torch.autograd.grad(o.sum(), inputs))
        prepares_again = "chunk_prepare" in [launched.program for launched in last_launches()]
        assert prepares_again == (not disable_recompute)
    assert all(torch.equal(one, other) for one, other in zip(*gradients))


def test_parameters_of_another_dtype():
    leaves = leaves_of(Case(20, 2, 2, 64, gate_in_kernel=True))
    inputs = [leaves[name] for name in ("q", "k", "v", "g", "beta")]
    A_log, dt_bias = (leaves[name].bfloat16().requires_grad_() for name in ("A_log", "dt_bias"))
    o, _ = fla.chunk_kda(*inputs, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)
    expected, _ = cake_kda_jit.chunk_kda(
        *inputs, use_gate_in_kernel=True, A_log=A_log.detach().float(), dt_bias=dt_bias.detach().float()
    )
    o.sum().backward()
    assert torch.equal(o, expected) and A_log.grad.dtype == torch.bfloat16 == dt_bias.grad.dtype


def test_the_old_name_of_the_state_layout():
    leaves = leaves_of(Case(20, 1, 1, 64))
    inputs = [leaves[name] for name in ("q", "k", "v", "g", "beta")]
    state = leaves["h0"]
    _, one = fla.chunk_kda(*inputs, initial_state=state, output_final_state=True, transpose_state_layout=True)
    _, other = fla.chunk_kda(*inputs, initial_state=state, output_final_state=True, state_v_first=True)
    assert torch.equal(one, other)


CONTEXT = KcpContext(Partition.contiguous([0, 20], 1), VirtualGroup(1)).of_rank(0)

REFUSED = {
    "intermediate states": ({"return_intermediate_states": True}, "return_intermediate_states"),
    "chunk size": ({"chunk_size": 16}, "chunk_size=16"),
    "both names": ({"state_v_first": True, "transpose_state_layout": True}, "old name of state_v_first"),
    "count without graph": ({"max_num_seqs": 4}, "max_num_seqs belongs to use_graph"),
    "too many documents": (
        {"use_graph": True, "max_num_seqs": 1, "cu_seqlens": torch.tensor([0, 5, 20])},
        "cu_seqlens has 3 entries; this plan holds 1 to 2",
    ),
    "their context": ({"cp_context": object()}, "cp_context is object"),
    "graph of a context": (
        {"cp_context": CONTEXT, "use_graph": True, "cu_seqlens": torch.tensor([0, 20])},
        "use_graph=True beside cp_context",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    keywords, message = REFUSED[case]
    leaves = leaves_of(Case(20, 1, 1, 64))
    with pytest.raises(UnsupportedProblemError, match=message):
        fla.chunk_kda(*(leaves[name] for name in ("q", "k", "v", "g", "beta")), **keywords)


def test_unknown_arguments_are_type_errors():
    with pytest.raises(TypeError, match="cu_seqlen"):
        fla.chunk_kda(*[None] * 5, cu_seqlen=None)
    with pytest.raises(TypeError, match="initial_states"):
        fla.causal_conv1d(None, initial_states=None)


# ---- convolution -----------------------------------------------------------------------------------------------------


def their_conv(x, weight, state, lengths):
    """Documents ``[T, D]`` behind their state's W tokens: y and the last W tokens, in FP64."""
    outputs, finals = [], []
    width = weight.shape[1]
    for own, before in zip(x.split(lengths), state):
        extended = torch.cat((before.T, own))
        y, _ = causal_conv1d_reference(extended.unsqueeze(0), weight, activation=None)
        outputs.append(y[0, width:])
        finals.append(extended[-width:].T)
    return torch.cat(outputs), torch.stack(finals)


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("lengths", [(5,), (1, 0, 2, 3, 4, 9), (0, 0)])
def test_convolution_states_hold_one_more_token(lengths, with_state):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, sum(lengths), 6, generator=generator)
    weight = torch.randn(6, 4, generator=generator)
    state = torch.randn(len(lengths), 6, 4, generator=generator) * with_state
    leaves = [tensor.requires_grad_() for tensor in (x, weight, state)]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    y, final = fla.causal_conv1d(
        x, weight, initial_state=state if with_state else None, output_final_state=True, cu_seqlens=cu_seqlens
    )
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y64, final64 = their_conv(exact[0][0], exact[1], exact[2], list(lengths))
    # fp32 sums of four terms.
    torch.testing.assert_close(y[0].double(), y64, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(final.double(), final64, rtol=0, atol=1e-6)
    directions = [torch.randn(t.shape, generator=generator) for t in (y, final)]
    torch.autograd.backward([y, final], directions)
    torch.autograd.backward([y64, final64], [directions[0][0].double(), directions[1].double()])
    for leaf, other in zip(leaves[: 2 + with_state], exact):
        torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [2, 4, 7])
def test_convolution_states_of_a_batch(tokens):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, tokens, 6, generator=generator).bfloat16()
    weight, state = torch.randn(6, 4, generator=generator), torch.randn(3, 6, 4, generator=generator)
    _, final = fla.causal_conv1d(x, weight, initial_state=state, output_final_state=True, activation="silu")
    extended = torch.cat((state, x.float().transpose(1, 2)), dim=2)
    assert final.dtype == torch.bfloat16 and torch.equal(final, extended[..., -4:].bfloat16())


def test_convolution_converts_the_rest():
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(1, 20, 6, generator=generator) for _ in range(2))
    weight, bias = torch.randn(6, 3, generator=generator), torch.randn(6, generator=generator)
    cu_seqlens = torch.tensor([0, 12, 20])
    plain, none = fla.causal_conv1d(x, weight, bias, activation="swish", cu_seqlens=cu_seqlens)
    assert none is None
    assert torch.equal(plain, cake_kda_jit.causal_conv1d(x, weight, bias, cu_seqlens=cu_seqlens)[0])
    for extra in ({"backend": "cuda"}, {"cu_seqlens_cpu": cu_seqlens}, {"chunk_indices": torch.zeros(2, 2)}):
        again, _ = fla.causal_conv1d(x, weight, bias, activation="swish", cu_seqlens=cu_seqlens, **extra)
        assert torch.equal(again, plain), extra
    added, _ = fla.causal_conv1d(x, weight, bias, residual, activation="swish", cu_seqlens=cu_seqlens)
    assert torch.equal(added, plain + residual)


CONV_REFUSED = {
    "no weight": ({"weight": None}, "weight is None"),
    "backend": ({"backend": "tpu"}, "backend='tpu'"),
    "seq_idx": ({"seq_idx": torch.zeros(1, 20)}, "seq_idx is given"),
    # One document: the oldest token of its state would be taken from the wrong rank's.
    "state of a context": ({"cp_context": CONTEXT, "output_final_state": True}, "output_final_state=True beside cp_c"),
    "host copy alone": ({"cu_seqlens_cpu": torch.tensor([0, 20])}, "cu_seqlens_cpu is given without cu_seqlens"),
    "indices alone": ({"chunk_indices": torch.zeros(2, 2)}, "chunk_indices is given without cu_seqlens"),
    "state": ({"initial_state": torch.zeros(1, 6, 2)}, r"expected \[N, D, W\] with W = 3"),
    "activation": ({"activation": "gelu"}, "activation='gelu'"),
}


@pytest.mark.parametrize("case", CONV_REFUSED)
def test_what_the_convolution_refuses(case):
    changes, message = CONV_REFUSED[case]
    with pytest.raises(UnsupportedProblemError, match=message):
        fla.causal_conv1d(**{"x": torch.zeros(1, 20, 6), "weight": torch.zeros(6, 3), **changes})


def test_the_same_kernels_run():
    leaves = leaves_of(Case(20, 1, 1, 64))
    fla.chunk_kda(*(leaves[name] for name in ("q", "k", "v", "g", "beta")))
    assert [launched.program for launched in last_launches()] == ["chunk_prepare", "chunk_scan"]
