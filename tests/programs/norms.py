"""Inputs for the programs of the gated norm, launches into poisoned memory, the FP64 reference with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cake_kda_jit.arch import host_arch
from cake_kda_jit.catalog import registry
from cake_kda_jit.programs.common import variant_name
from cake_kda_jit.programs.gated_norm_backward import tile_rows, workspace_bytes
from cake_kda_jit.record import Record
from cake_kda_jit.reference import gated_rms_norm_reference
from cake_kda_jit.runtime.load import get_kernel

from .convolutions import CODES, DTYPES, FP32_ERROR, ROUNDING, poisoned

EPS = 1e-5


@dataclass(frozen=True, eq=False)
class NormCase:
    """One call: x, gate and dy [T, HV, D], weight [D]."""

    x: Tensor
    gate: Tensor
    weight: Tensor
    dy: Tensor
    eps: float = EPS

    @property
    def num_rows(self) -> int:
        return self.x.shape[0] * self.x.shape[1]


def make_case(tokens=37, heads=3, head_dim=64, *, dtype=torch.float32, weight_dtype=None, seed=0) -> NormCase:
    generator = torch.Generator().manual_seed(seed)
    x, gate, dy = (torch.randn(tokens, heads, head_dim, generator=generator).to(dtype) for _ in range(3))
    return NormCase(x, gate, torch.randn(head_dim, generator=generator).to(weight_dtype or dtype), dy)


def shared_values(case: NormCase) -> dict[str, object]:
    return {
        "x": case.x.data_ptr(),
        "gate": case.gate.data_ptr(),
        "weight": case.weight.data_ptr(),
        "x_strides": case.x.stride(),
        "gate_strides": case.gate.stride(),
        "num_tokens": case.x.shape[0],
        "num_value_heads": case.x.shape[1],
        "weight_dtype": CODES[case.weight.dtype],
        "eps": case.eps,
    }


def forward_values(case: NormCase) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The argument block's values, and poisoned outputs."""
    outputs = {"y": poisoned(case.x)}
    return shared_values(case) | {"y": outputs["y"].data_ptr()}, outputs


def backward_values(case: NormCase, rows: int | None = None) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The argument block's values, and poisoned outputs with the workspace among them."""
    head_dim = case.x.shape[-1]
    tiles = max(1, -(-case.num_rows // (rows or tile_rows(case.num_rows))))
    outputs = {
        "dx": poisoned(case.x),
        "dgate": poisoned(case.gate),
        "dweight": poisoned(case.weight),
        "workspace": torch.full((tiles, head_dim), float("nan"), device=case.x.device),
    }
    if rows is None:
        assert outputs["workspace"].nbytes == workspace_bytes(case.num_rows, head_dim)
    values = {
        "dy": case.dy.data_ptr(),
        "dy_strides": case.dy.stride(),
        "workspace_bytes": outputs["workspace"].nbytes,
        "tile_rows": rows or tile_rows(case.num_rows),
    }
    return shared_values(case) | values | {name: out.data_ptr() for name, out in outputs.items()}, outputs


def record_of(program: str, case: NormCase, family: str = "cpu") -> Record:
    dtype = {found: name for name, found in DTYPES.items()}[case.x.dtype]
    return registry().get(program, variant_name(dtype, case.x.shape[-1]), family)


def launch(program: str, case: NormCase, values: dict[str, object], num_threads: int = 2) -> None:
    get_kernel(record_of(program, case), host_arch()).launch({"num_threads": num_threads} | values)


def run(case: NormCase, num_threads: int = 2) -> dict[str, Tensor]:
    """y, dx, dgate and dweight."""
    found = {}
    for program, make_values in (("gated_norm_forward", forward_values), ("gated_norm_backward", backward_values)):
        values, outputs = make_values(case)
        launch(program, case, values, num_threads)
        found |= outputs
    del found["workspace"]
    return found


def reference(case: NormCase) -> dict[str, Tensor]:
    """y and the gradients by FP64 autograd."""
    leaves = [tensor.double().requires_grad_() for tensor in (case.x, case.gate, case.weight)]
    y = gated_rms_norm_reference(*leaves, case.eps)
    gradients = torch.autograd.grad(y, leaves, case.dy.double())
    return {"y": y.detach()} | dict(zip(("dx", "dgate", "dweight"), gradients))


def assert_near(
    found: dict[str, Tensor], expected: dict[str, Tensor], case: NormCase, fp32_error: float = FP32_ERROR
) -> None:
    """Every element within its dtype's rounding and fp32's errors; those of the sum over rows grow with their root."""
    for name, tensor in found.items():
        absolute = fp32_error * max(1.0, case.num_rows) ** 0.5 if name == "dweight" else fp32_error
        error = (tensor.double() - expected[name]).abs()
        allowed = absolute + ROUNDING[tensor.dtype] * expected[name].abs()
        assert (error <= allowed).all(), (name, (error - allowed).max().item())


def assert_gates_far_from_zero(run: Callable[[NormCase], dict[str, Tensor]], gate: float, fp32_error: float) -> None:
    """The sigmoid is 1 on the right and 0 on the left, to the ends of fp32, and so are its gradients; NaN stays.

    ``fp32_error`` is that of what the sigmoid or its derivative scales; below e^-80 both are as good as 0.
    """
    gates = torch.tensor([-3e38, -1e4, -100.0, gate, -20.0, -1e-30, 0.0, 1e-30, 20.0, 100.0, 3e38, float("nan")])
    case = make_case(len(gates), 1)
    case = replace(case, gate=gates[:, None, None].expand(case.x.shape))
    found, expected = run(case), reference(case)
    sigmoid = case.gate.double().sigmoid()
    for name, factor in {"y": sigmoid, "dx": sigmoid, "dgate": sigmoid * (-case.gate.double()).sigmoid()}.items():
        error = (found[name].double() - expected[name]).abs()
        assert (error[:-1] <= fp32_error * factor[:-1] + 1e-30).all(), name
        assert found[name][-1].isnan().all(), name


def assert_a_row_has_the_same_bits_anywhere(run: Callable[[NormCase], dict[str, Tensor]]) -> None:
    """Rows by themselves have the bits that they have behind 150 others."""
    case = make_case(300, 1, dtype=torch.bfloat16)
    found = run(case)
    alone = run(replace(case, x=case.x[150:], gate=case.gate[150:], dy=case.dy[150:]))
    for name in ("y", "dx", "dgate"):
        assert torch.equal(alone[name], found[name][150:]), name


def strided_cases(case: NormCase) -> dict[str, NormCase]:
    """The same numbers in other layouts: what lies between them is NaN."""
    tokens, heads, head_dim = case.x.shape
    dtype = case.x.dtype

    def among_nan(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype)

    def spread(memory: Tensor, cut) -> NormCase:
        parts = (cut(part).copy_(given) for part, given in zip(memory, (case.x, case.gate, case.dy)))
        return NormCase(*(next(parts), next(parts)), case.weight, next(parts))

    slices = (slice(None), slice(1, 1 + heads), slice(8, 8 + head_dim))
    return {
        "whole aligned rows of wider ones": spread(among_nan(3, tokens, heads + 2, head_dim + 8), lambda m: m[slices]),
        "every third channel": spread(among_nan(3, tokens, heads, 3 * head_dim), lambda m: m[..., 1::3]),
        "heads first": spread(among_nan(3, heads, tokens, head_dim), lambda m: m.transpose(0, 1)),
        "channels first": spread(among_nan(3, head_dim, tokens, heads), lambda m: m.permute(1, 2, 0)),
        "misaligned": spread(
            among_nan(3, tokens * heads * head_dim + 1), lambda m: m[1:].view(tokens, heads, head_dim)
        ),
    }
