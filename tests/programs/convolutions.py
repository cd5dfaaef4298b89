"""Packs for the convolution programs: inputs, launches into poisoned memory, the FP64 reference with its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cake_kda_jit.arch import host_arch
from cake_kda_jit.catalog import registry
from cake_kda_jit.ops.conv import (
    ConvInputs,
    conv_backward,
    conv_backward_together,
    conv_forward,
    conv_forward_together,
)
from cake_kda_jit.programs.attention_fields import DTYPE_CODES
from cake_kda_jit.programs.conv_forward import join_parts
from cake_kda_jit.record import Record
from cake_kda_jit.reference import causal_conv1d_reference
from cake_kda_jit.runtime.launch import last_launches, operation
from cake_kda_jit.runtime.load import get_kernel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CODES = {DTYPES[name]: code for name, code in DTYPE_CODES.items()}
LENGTHS = (0, 1, 64, 2, 0, 3, 5)

# Half a unit in the last place, relative to a number just above a power of two, for what is stored in a narrow dtype.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}
# fp32 rounds by 6e-8; a handful of operations on numbers of up to about 8 make at most this much.
FP32_ERROR = 4e-6


@dataclass(frozen=True, eq=False)
class ConvPack:
    """One call: x and dy [T, D], weight [D, W], bias [D], states [N, D, W - 1]; None where an input is absent."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    initial_state: Tensor | None
    dy: Tensor
    dfinal_state: Tensor | None
    cu_seqlens: Tensor
    use_silu: bool = True

    @property
    def documents(self) -> int:
        return len(self.cu_seqlens) - 1


def make_pack(
    lengths=LENGTHS, *, channels=70, width=4, dtype=torch.float32, parameter_dtype=None, state_dtype=None, seed=0
) -> ConvPack:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal(*shape: int, as_dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(as_dtype)

    state = (len(lengths), channels, width - 1)
    return ConvPack(
        x=normal(tokens, channels, as_dtype=dtype),
        weight=normal(channels, width, as_dtype=parameter_dtype or dtype),
        bias=normal(channels, as_dtype=parameter_dtype or dtype),
        initial_state=normal(*state, as_dtype=state_dtype or dtype),
        dy=normal(tokens, channels, as_dtype=dtype),
        dfinal_state=normal(*state, as_dtype=state_dtype or dtype),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
    )


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def poisoned(like: Tensor | None) -> Tensor | None:
    """A contiguous tensor full of NaN."""
    return None if like is None else torch.full(like.shape, float("nan"), dtype=like.dtype, device=like.device)


def shared_values(pack: ConvPack, num_threads: int) -> dict[str, object]:
    states = [state for state in (pack.initial_state, pack.dfinal_state) if state is not None]
    return {
        "x": pack.x.data_ptr(),
        "weight": pack.weight.data_ptr(),
        "bias": address(pack.bias),
        "initial_state": address(pack.initial_state),
        "cu_seqlens": pack.cu_seqlens.data_ptr(),
        "x_strides": pack.x.stride(),
        "num_channels": pack.x.shape[1],
        "num_documents": pack.documents,
        "width": pack.weight.shape[1],
        "use_silu": int(pack.use_silu),
        "weight_dtype": CODES[pack.weight.dtype],
        "state_dtype": CODES[states[0].dtype if states else pack.x.dtype],
        "num_threads": num_threads,
    }


def forward_values(pack: ConvPack, num_threads: int = 2) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The argument block's values, and poisoned outputs."""
    outputs = {"y": poisoned(pack.x), "final_state": poisoned(pack.dfinal_state)}
    return shared_values(pack, num_threads) | {name: address(out) for name, out in outputs.items()}, outputs


def backward_values(pack: ConvPack, num_threads: int = 2) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The argument block's values, and poisoned outputs."""
    outputs = {
        "dx": poisoned(pack.x),
        "dweight": poisoned(pack.weight),
        "dbias": poisoned(pack.bias),
        "dinitial_state": poisoned(pack.initial_state),
    }
    inputs = {
        "dy": pack.dy.data_ptr(),
        "dy_strides": pack.dy.stride(),
        "dfinal_state": address(pack.dfinal_state),
    }
    return shared_values(pack, num_threads) | inputs | {name: address(out) for name, out in outputs.items()}, outputs


def launch(program: str, dtype: torch.dtype, values: dict[str, object]) -> None:
    launch_parts(program, dtype, [values])


def launch_parts(program: str, dtype: torch.dtype, parts: Sequence[dict[str, object]]) -> None:
    record = record_of(program, dtype, "cpu")
    get_kernel(record, host_arch()).launch(join_parts(record.entry, parts))


def record_of(program: str, dtype: torch.dtype, family: str) -> Record:
    return registry().get(program, {found: name for name, found in DTYPES.items()}[dtype], family)


def run_forward(pack: ConvPack, num_threads: int = 2) -> dict[str, Tensor]:
    values, outputs = forward_values(pack, num_threads)
    launch("conv_forward", pack.x.dtype, values)
    return {name: out for name, out in outputs.items() if out is not None}


def run_backward(pack: ConvPack, num_threads: int = 2) -> dict[str, Tensor]:
    values, outputs = backward_values(pack, num_threads)
    launch("conv_backward", pack.x.dtype, values)
    return {name: out for name, out in outputs.items() if out is not None}


def run_together(packs: Sequence[ConvPack], spare_rows: int = 0, device: str = "cpu") -> list[list[str]]:
    """Run packs of the same lengths together; asserts the bits of each alone; returns the programs of both passes.

    The forward has no states, the backward those of the packs.
    """

    def rows(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_full((spare_rows, tensor.shape[1]), float("nan"))]).to(device)

    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    with_states = [
        ConvInputs(
            *(rows(one.x), one.weight.to(device), moved(one.bias), moved(one.initial_state)),
            *(one.cu_seqlens.to(device), spare_rows > 0, one.use_silu),
        )
        for one in packs
    ]
    many = [replace(one, initial_state=None) for one in with_states]
    dys, dfinal_states = [rows(one.dy) for one in packs], [moved(one.dfinal_state) for one in packs]
    programs = []
    with operation():
        ys = conv_forward_together(many)
    programs.append([one.program for one in last_launches()])
    with operation():
        gradients = conv_backward_together(with_states, dys, dfinal_states)
    programs.append([one.program for one in last_launches()])
    for inputs, y in zip(many, ys, strict=True):
        assert torch.equal(y, conv_forward(inputs, output_final_state=False)[0])
    for found, *given in zip(gradients, with_states, dys, dfinal_states, strict=True):
        for gradient, expected in zip(found, conv_backward(*given), strict=True):
            assert gradient is expected is None or torch.equal(gradient, expected)
    return programs


def reference(pack: ConvPack) -> dict[str, Tensor]:
    """Outputs and gradients of every input that is given, by FP64 autograd."""
    inputs = {"x": pack.x, "weight": pack.weight, "bias": pack.bias, "initial_state": pack.initial_state}
    leaves = {name: given.double().requires_grad_() for name, given in inputs.items() if given is not None}
    y, final_state = causal_conv1d_reference(
        leaves["x"][None],
        leaves["weight"],
        leaves.get("bias"),
        activation="silu" if pack.use_silu else None,
        initial_state=leaves.get("initial_state"),
        cu_seqlens=pack.cu_seqlens,
    )
    loss = (y[0] * pack.dy.double()).sum()
    if pack.dfinal_state is not None:
        loss = loss + (final_state * pack.dfinal_state.double()).sum()
    gradients = torch.autograd.grad(loss, leaves.values())
    return {"y": y[0].detach(), "final_state": final_state.detach()} | {
        "d" + name: gradient for name, gradient in zip(leaves, gradients)
    }


def assert_near(
    found: dict[str, Tensor], expected: dict[str, Tensor], pack: ConvPack, fp32_error: float = FP32_ERROR
) -> None:
    """Every element within its dtype's rounding and fp32's errors; those of sums over tokens grow with their root."""
    for name, tensor in found.items():
        summed = name in ("dweight", "dbias")
        absolute = fp32_error * max(1.0, len(pack.x)) ** 0.5 if summed else fp32_error
        error = (tensor.double() - expected[name]).abs()
        allowed = absolute + ROUNDING[tensor.dtype] * expected[name].abs()
        assert (error <= allowed).all(), (name, (error - allowed).max().item())


def assert_equal_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
