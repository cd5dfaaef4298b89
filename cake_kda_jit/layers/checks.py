"""What a layer's modules, parameters and dtypes must be, in the layer's own terms; checked where it is not one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..errors import UnsupportedProblemError
from ..ops.checks import DEVICE_DTYPES, is_kernel_dtype


def check_modules(modules: Mapping[str, nn.Module | None], kinds: Iterable[tuple[str, type[nn.Module]]]) -> None:
    """Raise UnsupportedProblemError unless there is a module of every name, of its kind or of another."""
    for name, kind in kinds:
        if modules.get(name) is None:
            found = "None" if name in modules else "missing"
            raise UnsupportedProblemError(
                f"{name} of the layer is {found}; accepted: {kind.__name__}, or a module that is called like it; set "
                "one, or make the layer anew"
            )


def check_gate_parameters(**parameters: Tensor | None) -> None:
    """Raise UnsupportedProblemError unless the gate's parameters are there, in fp32."""
    for name, parameter in parameters.items():
        if parameter is None:
            raise UnsupportedProblemError(
                f"{name} of the layer is None; accepted: a parameter in torch.float32; set one, or make the layer anew"
            )
        if parameter.dtype != torch.float32:
            raise UnsupportedProblemError(
                f"{name} arrived in the layer as {parameter.dtype}; it must stay torch.float32. Under FSDP2 shard "
                "list(layer.children()) with the low precision and then the layer itself with "
                "MixedPrecisionPolicy(cast_forward_inputs=False), which leaves A_log and dt_bias as they are"
            )


def check_kernel_dtype(kernel_dtype: torch.dtype | None, q: Tensor, decay: Tensor) -> None:
    """Raise UnsupportedProblemError where kernels do not take q, k and v in the dtype that the layer gives them.

    ``q`` and ``decay`` are what projections gave, ``decay`` the decay's logits, which stay in their dtype.
    """
    if kernel_dtype is not None and not isinstance(kernel_dtype, torch.dtype):
        raise UnsupportedProblemError(
            f"kernel_dtype={kernel_dtype!r}; give a torch.dtype, or None for what the projections give"
        )
    dtype = q.dtype if kernel_dtype is None else kernel_dtype
    accepted = DEVICE_DTYPES.get(q.device.type)
    if accepted is not None and not is_kernel_dtype(dtype, q.device):
        given = f"kernel_dtype={kernel_dtype}" + (f" and projections that give {dtype}" if kernel_dtype is None else "")
        raise UnsupportedProblemError(
            f"{given} on {q.device}; kernels there take q, k and v as {', '.join(accepted)}: set kernel_dtype to one "
            "of them, or leave it None and cast the layer"
        )
    if kernel_dtype is not None and decay.dtype not in (dtype, torch.float32):
        raise UnsupportedProblemError(
            f"kernel_dtype={kernel_dtype} beside projections that give {decay.dtype}; they must give kernel_dtype or "
            "torch.float32: set kernel_dtype=None, or keep the layer in float32 and out of autocast"
        )
