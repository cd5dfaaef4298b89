"""Packs for the chunk programs: inputs, the argument block's values, launches into poisoned memory, FP64 references."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cake_kda_jit.arch import host_arch
from cake_kda_jit.catalog import registry
from cake_kda_jit.programs.attention_fields import BETA_FORMS, DTYPE_CODES, GATE_FORMS
from cake_kda_jit.programs.chunk_backward import workspace_bytes
from cake_kda_jit.record import Record
from cake_kda_jit.reference import gate, recurrent_kda
from cake_kda_jit.runtime.load import get_kernel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CODES = {DTYPES[name]: code for name, code in DTYPE_CODES.items()}
LOWER_BOUND = -5.0

# Half a unit in the last place of a number just above a power of two, relative to it.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}
# fp32 rounds by 6e-8; sums of up to 128 terms and a substitution over 64 rows make 4e-7 of it in norm, and single
# elements, which may be small beside their neighbours, reach ten times that.
FP32_TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class Pack:
    """One call: q, k [T, H, K], v, do [T, HV, V], g [T, HV, K], beta [T, HV], boundaries of the documents, options."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    do: Tensor
    boundaries: tuple[int, ...]
    initial_state: Tensor | None
    dfinal_state: Tensor | None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    gate_form: str = "ready"
    beta_form: str = "ready"
    l2norm: bool = False
    scale: float = 0.3

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @property
    def value_heads(self) -> int:
        return self.v.shape[1]

    @property
    def documents(self) -> int:
        return len(self.boundaries) - 1

    def chunk_offsets(self) -> Tensor:
        lengths = torch.tensor(self.boundaries).diff()
        return torch.cat([torch.zeros(1, dtype=torch.int64), ((lengths + 63) // 64).cumsum(0)])

    def document(self, index: int) -> Pack:
        """One document as a pack of its own."""
        rows = slice(self.boundaries[index], self.boundaries[index + 1])
        tensors = {name: getattr(self, name)[rows] for name in ("q", "k", "v", "g", "beta", "do")}
        states = {name: getattr(self, name)[index : index + 1] for name in ("initial_state", "dfinal_state")}
        return replace(self, boundaries=(0, rows.stop - rows.start), **tensors, **states)


def records_of(program: str) -> list[Record]:
    return [record for record in registry().records() if record.program == program and record.family == "cpu"]


def record_of(program: str, pack: Pack) -> Record:
    dtype = next(name for name, dtype in DTYPES.items() if dtype is pack.q.dtype)
    return registry().get(program, f"{dtype}_k{pack.head_dim}", "cpu")


def make_pack(
    lengths, *, dtype=torch.float32, g_dtype=None, K=64, H=1, HV=2, gate_form="ready", seed=0, **options
) -> Pack:
    """A random pack; gates of about -1.4 (ready), -0.4 (softplus) or -2.5 (bounded)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    T, N = sum(lengths), len(lengths)
    q, k, v, do = (normal(T, heads, K).to(dtype) for heads in (H, H, HV, HV))
    if not options.get("l2norm"):
        # The delta rule is stable for keys of norm at most 1 only.
        k = (k.float() / k.float().norm(dim=-1, keepdim=True) * 0.99).to(dtype)
    raw_g, raw_beta = normal(T, HV, K), normal(T, HV)
    g = raw_g if gate_form != "ready" else -raw_g.square() - 0.4
    beta = raw_beta if options.get("beta_form", "ready") != "ready" else raw_beta.sigmoid()
    parameters = {}
    if gate_form != "ready":
        parameters = {"A_log": 0.5 * normal(HV), "dt_bias": normal(HV, K) - (1.0 if gate_form == "softplus" else 0.0)}
    values = {
        "initial_state": normal(N, HV, K, K),
        "dfinal_state": normal(N, HV, K, K),
        **parameters,
        **options,
    }
    boundaries = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    g, beta = g.to(g_dtype or dtype), beta.to(g_dtype or dtype)
    return Pack(q, k, v, g, beta, do, boundaries, gate_form=gate_form, **values)


def argument_values(pack: Pack, num_threads: int = 2) -> dict[str, object]:
    """The fields that both programs share; tensors stand for their addresses."""
    values: dict[str, object] = {name: getattr(pack, name) for name in ("q", "k", "v", "g", "beta")}
    strides = {f"{name}_strides": tensor.stride() for name, tensor in values.items()}
    rest = {
        "A_log": pack.A_log,
        "dt_bias": pack.dt_bias,
        "initial_state": pack.initial_state,
        "cu_seqlens": torch.tensor(pack.boundaries),
        "chunk_offsets": pack.chunk_offsets(),
        "num_documents": pack.documents,
        "scale": pack.scale,
        "lower_bound": LOWER_BOUND,
        "num_heads": pack.q.shape[1],
        "num_value_heads": pack.value_heads,
        "g_dtype": CODES[pack.g.dtype],
        "beta_dtype": CODES[pack.beta.dtype],
        "gate_form": GATE_FORMS[pack.gate_form],
        "beta_form": BETA_FORMS[pack.beta_form],
        "use_qk_l2norm": int(pack.l2norm),
        "num_threads": num_threads,
    }
    return values | strides | rest


def launch(record: Record, values: dict[str, object]) -> None:
    addresses = {name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in values.items()}
    get_kernel(record, host_arch()).launch(addresses)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory in which an element that is never written is NaN."""
    return torch.full(shape, float("nan"), dtype=dtype)


def forward_outputs(pack: Pack) -> dict[str, Tensor]:
    K, HV = pack.head_dim, pack.value_heads
    return {
        "o": poisoned(*pack.v.shape, dtype=pack.q.dtype),
        "final_state": poisoned(pack.documents, HV, K, K),
        "chunk_states": poisoned(int(pack.chunk_offsets()[-1]), HV, K, K),
    }


def run_forward(pack: Pack, num_threads: int = 2) -> dict[str, Tensor]:
    """Launch chunk_forward; returns o, final_state and chunk_states."""
    outputs = forward_outputs(pack)
    launch(record_of("chunk_forward", pack), argument_values(pack, num_threads) | outputs)
    return outputs


def backward_values(
    pack: Pack, chunk_states: Tensor, num_threads: int = 2
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """All values of chunk_backward's argument block, and of those the outputs."""
    K, HV, N = pack.head_dim, pack.value_heads, pack.documents
    outputs = {
        "d" + name: poisoned(*tensor.shape, dtype=tensor.dtype)
        for name, tensor in ((name, getattr(pack, name)) for name in ("q", "k", "v", "g", "beta"))
    }
    outputs["dinitial_state"] = poisoned(N, HV, K, K)
    if pack.A_log is not None:
        outputs["dA_log"] = poisoned(HV)
    if pack.dt_bias is not None:
        outputs["ddt_bias"] = poisoned(HV, K)
    num_bytes = workspace_bytes(N, HV, K)
    rest = {
        "dA_log": None,
        "ddt_bias": None,
        "chunk_states": chunk_states,
        "do_": pack.do,
        "do_strides": pack.do.stride(),
        "dfinal_state": pack.dfinal_state,
        "workspace": poisoned(num_bytes // 4),
        "workspace_bytes": num_bytes,
    }
    return argument_values(pack, num_threads) | rest | outputs, outputs


def run_backward(pack: Pack, num_threads: int = 2) -> dict[str, Tensor]:
    """Launch chunk_backward on the states that chunk_forward keeps; returns every gradient there is."""
    values, outputs = backward_values(pack, run_forward(pack, num_threads)["chunk_states"], num_threads)
    launch(record_of("chunk_backward", pack), values)
    return outputs


def reference(pack: Pack, gradients: bool = True) -> dict[str, Tensor]:
    """FP64: o, final_state, every gradient by autograd, and "dA_log terms", the [T, HV, K] summands of dA_log."""
    torch.set_flush_denormal(True)  # below 1e-308: strong decays reach it, and it is slow
    try:
        with torch.set_grad_enabled(gradients):
            return _reference(pack, gradients)
    finally:
        torch.set_flush_denormal(False)


def _reference(pack: Pack, gradients: bool) -> dict[str, Tensor]:
    names = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
    tensors = {name: getattr(pack, name) for name in names}
    leaves = {name: x.double().requires_grad_(gradients) for name, x in tensors.items() if x is not None}
    log_decay = leaves["g"]
    if pack.gate_form != "ready":
        bound = LOWER_BOUND if pack.gate_form == "bounded" else None
        log_decay = gate(leaves["g"], leaves.get("A_log"), leaves.get("dt_bias"), bound)
    inputs = [leaves["q"], leaves["k"], leaves["v"], log_decay, leaves["beta"]]
    o, final_state = recurrent_kda(
        *(x.unsqueeze(0) for x in inputs),
        cu_seqlens=pack.boundaries,
        initial_state=leaves.get("initial_state"),
        scale=pack.scale,
        use_qk_l2norm_in_kernel=pack.l2norm,
        use_beta_sigmoid_in_kernel=pack.beta_form != "ready",
        allow_neg_eigval=pack.beta_form == "two_sigmoid",
    )
    found = {"o": o[0].detach(), "final_state": final_state.detach()}
    return found | _gradients(pack, o, final_state, leaves, log_decay) if gradients else found


def _gradients(
    pack: Pack, o: Tensor, final_state: Tensor, leaves: dict[str, Tensor], log_decay: Tensor
) -> dict[str, Tensor]:
    log_decay.retain_grad()
    dfinal_state = torch.zeros_like(final_state) if pack.dfinal_state is None else pack.dfinal_state.double()
    torch.autograd.backward([o, final_state], [pack.do.double().unsqueeze(0), dfinal_state])
    found = {"d" + name: leaf.grad for name, leaf in leaves.items()}
    if pack.gate_form == "softplus":
        found["dA_log terms"] = log_decay.grad * log_decay.detach()
    elif pack.gate_form == "bounded":
        bias = 0.0 if pack.dt_bias is None else pack.dt_bias.double()
        found["dA_log terms"] = found["dg"] * (pack.g.double() + bias)
    return found


def assert_near(name: str, found: Tensor, expected: Tensor, tolerance: float = FP32_TOLERANCE) -> None:
    """Every element within one rounding of its dtype, and `tolerance` of itself and of the tensor's rms."""
    assert found.shape == expected.shape, name
    assert torch.isfinite(found).all(), name
    if found.numel():
        rms = expected.square().mean().sqrt()
        bound = (ROUNDING[found.dtype] + tolerance) * expected.abs() + tolerance * rms
        worst = ((found.double() - expected).abs() / bound.clamp_min(1e-30)).max().item()
        assert worst <= 1.0, f"{name}: an element is off by {worst:.3g} times its tolerance"


def assert_all_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = FP32_TOLERANCE) -> None:
    """Every output that has a reference; parameter gradients, which cancel, against sums of absolute values."""
    for name, tensor in found.items():
        if name in ("dA_log", "ddt_bias"):
            absolute = expected["dg"].abs().sum(0) if name == "ddt_bias" else expected["dA_log terms"].abs().sum((0, 2))
            error = (tensor.double() - expected[name]).abs()
            assert (error <= tolerance * absolute).all(), f"{name}: {(error / absolute).max().item():.3g}"
        elif name in expected:
            assert_near(name, tensor, expected[name], tolerance)


def assert_equal_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        assert torch.equal(tensor.view(integers), expected[name].view(integers)), name
