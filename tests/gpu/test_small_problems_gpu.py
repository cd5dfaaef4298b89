"""Every shipped CUDA kernel once or a few times on a small problem: what ``tests/sanitize.sh`` runs its tools over.

Results are checked too, but loosely: other files hold the budgets, here an access that goes wrong is looked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from cake_kda_jit import KdaOptions, causal_conv1d, chunk_kda, make_plan
from cake_kda_jit.bench import problems
from cake_kda_jit.bench.problems import NAMES, Problem, make_problem, relative_error
from cake_kda_jit.bench.walk import choose_records
from cake_kda_jit.bench.walk_precision import make_walk, walk_errors
from cake_kda_jit.catalog import registry
from cake_kda_jit.ops.gated import gated_rms_norm
from cake_kda_jit.programs.common import HEAD_DIMS
from cake_kda_jit.reference import causal_conv1d_reference, gated_rms_norm_reference
from cake_kda_jit.runtime.device import arch_of_device
from cake_kda_jit.runtime.load import loaded_kernels

from ..programs.walks import make_summaries

pytestmark = pytest.mark.gpu

LENGTHS = (130, 65, 1)
LONGER = (400, 65, 1)
"""Seven chunks: the scans' rings of two and three stages come round."""
TOLERANCE = 2e-2
"""Five times what bf16 tiles cost, and a fiftieth of what one wrong row of 200 does."""
ONE_GROUP = 1 << 22
"""Bytes of scratch, enough for one group of heads in the backward: the other runs in further launches."""


@dataclass(frozen=True)
class Case:
    """One step: what kernels are compiled for, and what they take different paths for."""

    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    family: str | None = None
    regime: str = "bounded"
    backward: str = "saved"
    segment_tokens: int = 0
    value_heads: int = 2
    with_state: bool = True
    dense: bool = True
    limit: int | None = None
    lengths: tuple[int, ...] = LENGTHS
    keep_decayed_qk: bool = False

    @property
    def options(self) -> KdaOptions:
        return KdaOptions(self.backward, 128, self.limit, self.family, self.keep_decayed_qk)


def cases():
    for family in (None, "smxx"):
        for head_dim, dtype in ((64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16)):
            yield Case(head_dim, dtype, family, lengths=LONGER)
            yield Case(head_dim, dtype, family, "weak", "replay", 256, 4, False, lengths=LONGER)
    yield Case(128, regime="softplus", dense=False)
    yield Case(128, backward="replay", value_heads=4, limit=ONE_GROUP, lengths=LONGER)
    yield Case(128, segment_tokens=64, value_heads=4, keep_decayed_qk=True)


def name_of(case: Case) -> str:
    parts = (case.family or "best", str(case.dtype).removeprefix("torch."), case.head_dim, case.regime, case.backward)
    extra = [f"segments {case.segment_tokens}"] * bool(case.segment_tokens)
    extra += ["strided"] * (not case.dense) + ["head blocks"] * bool(case.limit)
    extra += ["decayed q and k kept"] * case.keep_decayed_qk
    return " ".join(map(str, (*parts, *extra)))


@cache
def problem_of(lengths, regime, head_dim, dtype, value_heads=2, with_state=True) -> tuple[Problem, dict[str, Tensor]]:
    options = {"value_heads": value_heads, "with_state": with_state}
    problem = make_problem(lengths, regime=regime, head_dim=head_dim, dtype=dtype, **options)
    return problem, problems.reference(problem)


@pytest.mark.parametrize("case", list(cases()), ids=name_of)
def test_a_step(case):
    problem, expected = problem_of(
        case.lengths, case.regime, case.head_dim, case.dtype, case.value_heads, case.with_state
    )
    heads = {"num_heads": 2, "num_value_heads": case.value_heads, "head_dim": case.head_dim}
    plan = make_plan(problem.cu_seqlens, **heads, device="cuda", segment_tokens=case.segment_tokens)

    def step(*inputs, **keywords):
        if not case.dense:
            inputs = [torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in inputs]
        return chunk_kda(*inputs, **keywords, plan=plan, options=case.options)

    found = problems.run(step, problem.to("cuda"), output_final_state=True)
    for name, tensor in found.items():
        if name != "dA_log":  # a cancelling sum: other tests measure it by what cancels
            assert relative_error(tensor.cpu(), expected[name]) <= TOLERANCE, name


def test_many_heads():
    """The scans' CTAs own whole heads, their rings come round, and CTAs of chunk_prepare take a second turn."""
    heads = max(66, torch.cuda.get_device_properties(0).multi_processor_count // 2 + 2)
    problem = make_problem((250,), heads=heads, head_dim=128).to("cuda")
    expected = problems.chunk_reference(problem)
    for name, tensor in problems.run(chunk_kda, problem, output_final_state=True).items():
        if name != "dA_log":
            assert relative_error(tensor, expected[name]) <= TOLERANCE, name


@pytest.mark.parametrize("segment_tokens", [0, 128])
def test_a_capacity_plan(segment_tokens):
    """Its tables are made on the device, and documents and rows are left empty."""
    problem, expected = problem_of(LENGTHS, "bounded", 128, torch.bfloat16, with_state=False)
    sizes = {"max_documents": 5, "max_tokens": 256, "segment_tokens": segment_tokens}
    plan = make_plan(problem.cu_seqlens.cuda(), num_heads=2, head_dim=128, device="cuda", **sizes)
    rows = sum(LENGTHS)
    spare = {name: x.new_zeros(1, 256 - rows, *x.shape[2:]) for name, x in problem.inputs.items()}
    leaves = {n: torch.cat([problem.inputs[n], spare[n]], dim=1).cuda().requires_grad_() for n in NAMES}
    keywords = {n: x.cuda() if isinstance(x, Tensor) else x for n, x in problem.keywords.items()}
    o, _ = chunk_kda(*leaves.values(), plan=plan, **keywords)
    o.square().sum().backward()
    assert relative_error(o[:, :rows].detach().cpu(), expected["o"]) <= TOLERANCE
    for leaf in leaves.values():
        assert leaf.grad.isfinite().all() and not leaf.grad[:, rows:].any()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_walk(head_dim):
    M, B = make_summaries(4, 2, head_dim)
    device = torch.device("cuda", 0)
    for transpose in (False, True):
        walk = make_walk(M, B, transpose)
        for record in choose_records(arch_of_device(device), None):
            assert max(walk_errors(record, walk, device).values()) <= 1e-3, record.name


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_convolution(dtype, dense):
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": (1, sum(LENGTHS), 200), "weight": (200, 4), "bias": (200,), "initial_state": (3, 200, 3)}
    inputs = {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}
    boundaries = torch.tensor([0, *LENGTHS]).cumsum(0)

    def step(function, leaves, **keywords):
        x, weight, bias, state = (leaf.detach().requires_grad_() for leaf in leaves)
        given = x if dense else torch.stack([x, x], dim=-1)[..., 0]
        y, final = function(given, weight, bias, initial_state=state, **keywords)
        (y.square().sum() + final.square().sum()).backward()
        return [y.detach(), final.detach(), *(leaf.grad for leaf in (x, weight, bias, state))]

    leaves = [tensor.cuda() for tensor in inputs.values()]
    found = step(causal_conv1d, leaves, cu_seqlens=boundaries.cuda(), output_final_state=True)
    leaves = [tensor.double() for tensor in inputs.values()]
    expected = step(causal_conv1d_reference, leaves, cu_seqlens=boundaries)
    for one, other in zip(found, expected):
        assert relative_error(one.cpu(), other) <= TOLERANCE


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gated_norm(dtype, head_dim, dense):
    """111 rows: the last CTA of the forward and the last tile of the backward are not full."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(size, generator=generator).to(dtype) for size in ((37, 3, head_dim),) * 2 + ((head_dim,),)]

    def step(function, leaves):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        x, gate, weight = leaves
        y = function(x if dense else torch.stack([x, x], dim=-1)[..., 0], gate, weight, 1e-5)
        y.square().sum().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    found = step(gated_rms_norm, [tensor.cuda() for tensor in inputs])
    expected = step(gated_rms_norm_reference, [tensor.double() for tensor in inputs])
    for one, other in zip(found, expected):
        assert relative_error(one.cpu(), other) <= TOLERANCE


def test_nothing_shipped_was_left_out():
    """Runs last, and means something only behind all others of this file."""
    arch = arch_of_device(torch.device("cuda", 0))
    ours = {r.name for r in registry().shipped() if r.family in arch.families and arch.name in r.archs}
    missing = ours - {kernel.record.name for kernel in loaded_kernels()}
    if len(missing) == len(ours):
        pytest.skip("no other test of this file ran in this process")
    assert not missing
