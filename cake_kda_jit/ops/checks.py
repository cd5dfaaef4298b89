"""Checks of tensors before any launch. Each message says what was given, what is accepted, what to do."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from ..errors import PlanMismatchError, UnsupportedProblemError
from .pack import check_boundaries
from .plan import HEAD_DIMS, BatchTables, Plan, PlanHeads, boundaries_of, plan_of_boundaries, tables_of_batch

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
CONV_WIDTHS = (2, 3, 4)
DEVICE_DTYPES = {"cpu": ("bf16", "fp16", "fp32"), "cuda": ("bf16", "fp16")}


def _shape(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)}"


def check_tensors(**values: object) -> None:
    """Raise unless every value is a dense tensor, or None for an absent one."""
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise UnsupportedProblemError(f"{name} is {type(value).__name__}; give a tensor")
        if value.layout != torch.strided or value.is_nested:
            found = "a nested tensor" if value.is_nested else f"of layout {value.layout}"
            raise UnsupportedProblemError(f"{name} is {found}; give a dense one, documents packed along T")


def check_required(**values: object) -> None:
    """Raise unless every value is a tensor."""
    for name, value in values.items():
        if value is None:
            raise UnsupportedProblemError(f"{name} is None; give a tensor")
    check_tensors(**values)


def check_no_transform(operation: str, *tensors: torch.Tensor | None) -> None:
    """Raise inside a transform of ``torch.func`` and for tensors that carry a forward-mode tangent.

    Torch would loop over a vmap, and give no tangent at all without a word.
    """
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedProblemError(
            f"{operation} is called inside a transform of torch.func (grad, vjp, jvp, vmap, ...), which it does not "
            "support; use .backward() or torch.autograd.grad, and a batch dimension or packed documents for vmap"
        )
    if forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        raise UnsupportedProblemError(
            f"{operation} is given a tensor with a forward-mode tangent, and has no forward-mode derivative; use "
            ".backward() or torch.autograd.grad"
        )


def check_gradients(operation: str, *directions: torch.Tensor | None) -> None:
    """Raise inside a transform of ``torch.func`` and for a batch of gradients, which torch would loop over."""
    check_no_transform(operation)
    if any([one is not None and torch._C._functorch.is_legacy_batchedtensor(one) for one in directions]):
        raise UnsupportedProblemError(
            f"{operation} is given a batch of gradients (is_grads_batched or vectorize=True), which it does not "
            "support; call torch.autograd.grad once for each of them"
        )


def check_dtype(name: str, tensor: torch.Tensor, accepted: tuple[torch.dtype, ...], advice: str) -> None:
    """Raise unless the tensor has one of the accepted dtypes."""
    if tensor.dtype not in accepted:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(accepted))
        raise UnsupportedProblemError(f"{name} is {tensor.dtype}; accepted here: {names}; {advice}")


def check_same_device(reference: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Raise unless all tensors that are given live on the reference's device."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != reference.device:
            raise UnsupportedProblemError(
                f"{name} is on {tensor.device} but other inputs are on {reference.device}; move all to one device"
            )


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...], meaning: str) -> None:
    """Raise unless the tensor has the expected shape."""
    if tuple(tensor.shape) != expected:
        raise UnsupportedProblemError(f"{name} has shape {_shape(tensor)}; expected {meaning} = {list(expected)}")


def is_kernel_dtype(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels on the device compute from the dtype."""
    return DTYPE_NAMES.get(dtype) in DEVICE_DTYPES.get(device.type, ())


def kernel_dtype(name: str, tensor: torch.Tensor) -> str:
    """Return bf16, fp16 or fp32, if kernels on the tensor's device compute from it."""
    if not is_kernel_dtype(tensor.dtype, tensor.device):
        accepted = DEVICE_DTYPES.get(tensor.device.type, ())
        raise UnsupportedProblemError(
            f"{name} is {tensor.dtype} on {tensor.device}; accepted there: "
            f"{', '.join(accepted) or 'nothing'}; convert it first"
        )
    return DTYPE_NAMES[tensor.dtype]


def check_attention_shapes(q, k, v, g, beta) -> None:
    """Raise unless q, k, v, g and beta are tensors of one dtype, one device and shapes that belong together."""
    check_required(q=q, k=k, v=v, g=g, beta=beta)
    for name, tensor in (("q", q), ("v", v)):
        if tensor.dim() != 4:
            raise UnsupportedProblemError(f"{name} has shape {_shape(tensor)}; give [B, T, heads, channels]")
    batch, tokens, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    check_shape("k", k, tuple(q.shape), "the shape of q, [B, T, H, K]")
    check_shape("v", v, (batch, tokens, value_heads, value_dim), "[B, T, HV, V] with q's B and T")
    if value_heads < 1 or heads < 1 or value_heads % heads:
        raise UnsupportedProblemError(f"q has {heads} heads and v {value_heads}; v's must be a multiple of q's")
    if key_dim != value_dim or key_dim not in HEAD_DIMS:
        raise UnsupportedProblemError(
            f"K = {key_dim} and V = {value_dim}; K and V must be equal and one of {HEAD_DIMS}"
        )
    check_shape("g", g, (batch, tokens, value_heads, key_dim), "[B, T, HV, K], one gate per value head and key channel")
    check_shape("beta", beta, (batch, tokens, value_heads), "[B, T, HV]")
    kernel_dtype("q", q)
    check_dtype("k", k, (q.dtype,), "q, k and v share one dtype")
    check_dtype("v", v, (q.dtype,), "q, k and v share one dtype")
    for name, tensor in (("g", g), ("beta", beta)):
        check_dtype(name, tensor, (q.dtype, torch.float32), "g and beta have q's dtype or float32")
    check_same_device(q, k=k, v=v, g=g, beta=beta)


def check_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise unless x, weight and bias are tensors of shapes, dtypes and a device that belong together."""
    check_required(x=x, weight=weight)
    check_tensors(bias=bias)
    if x.dim() != 3:
        raise UnsupportedProblemError(f"x has shape {list(x.shape)}; expected [B, T, D]")
    if weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] not in CONV_WIDTHS:
        raise UnsupportedProblemError(
            f"weight has shape {list(weight.shape)}; expected [D, W] = [{x.shape[2]}, 2 to 4]"
        )
    kernel_dtype("x", x)
    check_dtype("weight", weight, (x.dtype, torch.float32), "weight has x's dtype or float32")
    if bias is not None:
        check_dtype("bias", bias, (weight.dtype,), "bias has weight's dtype")
        check_shape("bias", bias, (x.shape[2],), "[D]")
    check_same_device(x, weight=weight, bias=bias)


def check_gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Raise unless x, gate and weight are tensors of shapes, dtypes and a device that belong together."""
    check_required(x=x, gate=gate, weight=weight)
    if x.dim() not in (3, 4) or x.shape[-1] not in HEAD_DIMS or x.shape[-2] < 1:
        raise UnsupportedProblemError(
            f"x has shape {_shape(x)}; expected [T, HV, D] or [B, T, HV, D] with D one of {HEAD_DIMS}"
        )
    shapes = [list(x.shape), [*x.shape[:-2], x.shape[-2] * x.shape[-1]]]
    if list(gate.shape) not in shapes:
        raise UnsupportedProblemError(f"gate has shape {_shape(gate)}; expected {shapes[0]} or {shapes[1]}")
    check_shape("weight", weight, (x.shape[-1],), "[D]")
    check_dtype("x", x, tuple(DTYPE_NAMES), "convert it first")
    check_dtype("gate", gate, (x.dtype,), "x and gate share one dtype")
    check_dtype("weight", weight, tuple(DTYPE_NAMES), "convert it first")
    check_same_device(x, gate=gate, weight=weight)
    if x.device.type not in DEVICE_DTYPES:
        raise UnsupportedProblemError(f"x is on {x.device}; kernels run on: {', '.join(DEVICE_DTYPES)}")
    if not isinstance(eps, (int, float)) or not 0.0 <= eps <= torch.finfo(torch.float32).max:
        raise UnsupportedProblemError(f"eps={eps!r}; give a finite number of float32 that is not negative")


def check_gate(
    use_gate: bool, lower_bound: float | None, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, v: torch.Tensor
) -> None:
    """Raise unless the gate's options belong together and its parameters have their shapes."""
    value_heads, head_dim = v.shape[2:]
    if lower_bound is not None and not -5.0 <= lower_bound <= -1e-30:
        raise UnsupportedProblemError(f"lower_bound={lower_bound}; it must lie in [-5, 0)")
    if not use_gate:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
            if value is not None:
                raise UnsupportedProblemError(
                    f"{name} is given but use_gate_in_kernel is False, so it would get no "
                    f"gradient; set use_gate_in_kernel=True or leave {name} out"
                )
        return
    if A_log is None and lower_bound is None:
        raise UnsupportedProblemError("use_gate_in_kernel=True needs A_log [HV], or a lower_bound for the bounded gate")
    if A_log is not None:
        check_dtype("A_log", A_log, (torch.float32,), "gate parameters stay in float32")
        check_shape("A_log", A_log, (value_heads,), "[HV]")
    if dt_bias is not None:
        check_dtype("dt_bias", dt_bias, (torch.float32,), "gate parameters stay in float32")
        if tuple(dt_bias.shape) not in ((value_heads * head_dim,), (value_heads, head_dim)):
            raise UnsupportedProblemError(
                f"dt_bias has shape {_shape(dt_bias)}; expected [HV * K] = "
                f"[{value_heads * head_dim}] or [HV, K] = [{value_heads}, {head_dim}]"
            )
    check_same_device(v, A_log=A_log, dt_bias=dt_bias)


def check_state(name: str, state: torch.Tensor | None, expected: tuple[int, ...], meaning: str, like: torch.Tensor):
    """Raise unless an optional recurrent state is fp32, of the expected shape, on the device of ``like``."""
    if state is None:
        return
    check_dtype(name, state, (torch.float32,), "recurrent states stay in float32")
    check_shape(name, state, expected, meaning)
    check_same_device(like, **{name: state})


def check_plan_boundaries(
    plan: Plan, cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None = None
) -> None:
    """Raise PlanMismatchError when the boundaries given beside a plan are not the plan's."""
    if not isinstance(plan, Plan):
        raise UnsupportedProblemError(f"plan is {type(plan).__name__}; give what make_plan returned")
    for given in (cu_seqlens, cu_seqlens_cpu):
        _check_given_boundaries(plan, given)


def _check_given_boundaries(plan: Plan, cu_seqlens: torch.Tensor | None) -> None:
    # Content on a GPU is not compared: that copy to the host is what the plan exists to avoid. Nor is it in a trace.
    if cu_seqlens is None or torch.compiler.is_compiling():
        return
    if not isinstance(cu_seqlens, torch.Tensor):
        raise UnsupportedProblemError(
            f"cu_seqlens is {type(cu_seqlens).__name__}; give an int32 or int64 tensor [N + 1]"
        )
    given, planned = cu_seqlens.numel(), plan.num_documents + 1
    if given != planned and not (plan.has_spare_rows and 1 <= given < planned):
        raise PlanMismatchError(f"cu_seqlens has {given} entries; the plan was made for {plan.num_documents} documents")
    if cu_seqlens.device.type == "cpu" and not plan.may_hold(boundaries_of(cu_seqlens)):
        raise PlanMismatchError("cu_seqlens differs from the boundaries that the plan holds; make or update a plan")


def pack_boundaries(tokens: int, cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None = None) -> list[int]:
    """Return the boundaries of a pack that is given without a plan; raises unless they end at ``tokens``."""
    if torch.compiler.is_compiling():
        raise UnsupportedProblemError(
            "cu_seqlens inside torch.compile would be copied to the host; call make_plan outside and pass the plan"
        )
    boundaries = boundaries_of(cu_seqlens, cu_seqlens_cpu)
    check_boundaries(boundaries, tokens)
    return boundaries


def plan_for(q: torch.Tensor, v: torch.Tensor, cu_seqlens, cu_seqlens_cpu, plan: Plan | None) -> Plan | BatchTables:
    """Return the given plan if it fits the inputs, else that of cu_seqlens, else the tables of equal lengths.

    Raises PlanMismatchError when plan and inputs disagree.
    """
    batch, tokens, heads, head_dim = q.shape
    value_heads = v.shape[2]
    if (cu_seqlens is not None or plan is not None) and batch != 1:
        raise UnsupportedProblemError(
            f"B = {batch} with cu_seqlens or a plan; a pack has B = 1: join the batch along T"
        )
    if plan is not None:
        check_plan_boundaries(plan, cu_seqlens, cu_seqlens_cpu)
        given = (tokens, heads, value_heads, head_dim, q.device)
        planned = (plan.num_tokens, plan.num_heads, plan.num_value_heads, plan.head_dim, plan.device)
        if given != planned:
            raise PlanMismatchError(f"inputs have (T, H, HV, K, device) = {given}; the plan was made for {planned}")
        return plan
    if cu_seqlens is None and cu_seqlens_cpu is not None:
        raise UnsupportedProblemError("cu_seqlens_cpu is given without cu_seqlens; it is only its copy: give both")
    if cu_seqlens is None:
        return tables_of_batch(batch, tokens, value_heads, head_dim, q.device)
    boundaries = pack_boundaries(tokens, cu_seqlens, cu_seqlens_cpu)
    return plan_of_boundaries(boundaries, PlanHeads(heads, value_heads, head_dim), q.device)
