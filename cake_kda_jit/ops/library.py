"""Every operation as a pair of functional torch.library operators with fake implementations.

Operators take tensors, ints, floats and strings only: a plan passes as its tables and its number of summaries. An
output that is not wanted is an empty tensor, because an operator's outputs are fixed by its schema.
"""

from __future__ import annotations

import torch

from .. import config
from ..errors import UnsupportedProblemError
from ..runtime.launch import operation
from .backward import chunk_backward
from .conv import ConvInputs, conv_backward, conv_forward
from .forward import CONTEXT_NAMES, Context, chunk_forward, context_dtype, context_shapes
from .inputs import Inputs, Transforms
from .pipeline import Pipeline
from .problem import KdaOptions
from .summary import summarize
from .walk import walk

NAMESPACE = "cake_kda_jit"

_ATTENTION_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor chunk_table, Tensor segment_table, Tensor summary_offsets, int num_summaries, "
)
_TRANSFORMS = "float scale, float? lower_bound, bool use_qk_l2norm, str gate_form, str beta_form, "
_OPTIONS = "str backward, int checkpoint_tokens, int? workspace_limit, str? family"
_CONV_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor cu_seqlens, "
_NUM_TENSORS = 11  # of the attention inputs; num_summaries follows them
_NUM_DIFFERENTIABLE = 8
_NUM_ARGUMENTS = 21  # inputs, transforms and options

_library = torch.library.Library(NAMESPACE, "DEF")


def _define(schema: str, implementation, fake) -> None:
    name = schema.split("(")[0]
    _library.define(schema)

    def run(*arguments):
        with operation():
            return implementation(*arguments)

    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def _refuse_gradient(name: str, advice: str) -> None:
    """Make an operator's outputs raise in a backward, where torch would warn and give nothing."""

    def refuse(ctx, *gradients):
        raise UnsupportedProblemError(f"{name} has no gradient; {advice}")

    torch.library.register_autograd(f"{NAMESPACE}::{name}", refuse, lib=_library)


def _present(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0, dtype=torch.float32) if tensor is None else tensor


# ---- attention -------------------------------------------------------------------------------------------------------


def _problem(arguments: tuple) -> tuple[Inputs, Transforms, KdaOptions]:
    inputs, transforms, options = arguments[:12], arguments[12:17], arguments[17:_NUM_ARGUMENTS]
    return Inputs(*inputs), Transforms(*transforms), KdaOptions(*options)


def _attention_forward(*arguments):
    inputs, transforms, options = _problem(arguments)
    output_final_state, keep = arguments[_NUM_ARGUMENTS:]
    pipeline = Pipeline(inputs, transforms, options.family)
    o, final_state, context = chunk_forward(pipeline, options, output_final_state=output_final_state, keep=keep)
    kept = (getattr(context, name) for name in CONTEXT_NAMES)
    return o, *(_present(tensor, o) for tensor in (final_state, *kept))


def _attention_forward_fake(*arguments):
    inputs, _, options = _problem(arguments)
    output_final_state, keep = arguments[_NUM_ARGUMENTS:]
    shapes = context_shapes(inputs, options.backward if keep else None, options.checkpoint_tokens)
    o = inputs.v.new_empty(inputs.v.shape)
    final_shape = inputs.state_shape() if output_final_state else (0,)
    kept = (o.new_empty(shapes.get(name, (0,)), dtype=context_dtype(name, shapes, o.device)) for name in CONTEXT_NAMES)
    return o, o.new_empty(final_shape, dtype=torch.float32), *kept


def _attention_backward(do, dfinal_state, *rest):
    context, arguments = Context(*rest[: len(CONTEXT_NAMES)]), rest[len(CONTEXT_NAMES) :]
    inputs, transforms, options = _problem(arguments)
    found = chunk_backward(Pipeline(inputs, transforms, options.family), options, context, do, dfinal_state)
    return (
        found.dq,
        found.dk,
        found.dv,
        found.dg,
        found.dbeta,
        _present(found.dA_log, do),
        _present(found.ddt_bias, do),
        _present(found.dinitial_state, do),
    )


def _attention_backward_fake(do, dfinal_state, *rest):
    tensors = rest[len(CONTEXT_NAMES) :][:_NUM_DIFFERENTIABLE]
    return tuple(_present(None, do) if tensor is None else tensor.new_empty(tensor.shape) for tensor in tensors)


_define(
    f"chunk_kda_forward({_ATTENTION_INPUTS}{_TRANSFORMS}{_OPTIONS}, bool output_final_state, bool keep)"
    f" -> (Tensor, Tensor{', Tensor' * len(CONTEXT_NAMES)})",
    _attention_forward,
    _attention_forward_fake,
)
_define(
    "chunk_kda_backward(Tensor do, Tensor? dfinal_state, "
    f"{''.join(f'Tensor? {name}, ' for name in CONTEXT_NAMES)}{_ATTENTION_INPUTS}{_TRANSFORMS}{_OPTIONS})"
    f" -> (Tensor{', Tensor' * (_NUM_DIFFERENTIABLE - 1)})",
    _attention_backward,
    _attention_backward_fake,
)


def _attention_setup(ctx, inputs, output):
    # Without this, autograd would fill gradients of the kept tensors, as large as they are, with zeros.
    ctx.set_materialize_grads(False)
    ctx.options = inputs[_NUM_TENSORS:_NUM_ARGUMENTS]
    kept = [tensor if tensor.numel() else None for tensor in output[2:]]
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *kept)


def _attention_autograd(ctx, do, dfinal_state, *_):
    saved = ctx.saved_tensors  # read once: under activation checkpointing a second reading is an error
    tensors, kept = saved[:_NUM_TENSORS], saved[_NUM_TENSORS:]
    v = tensors[2]
    if do is None:
        do = v.new_zeros(()).expand(v.shape)
    if dfinal_state is not None:
        dfinal_state = dfinal_state.contiguous()
    gradients = torch.ops.cake_kda_jit.chunk_kda_backward(do, dfinal_state, *kept, *tensors, *ctx.options)
    found = [None if tensor is None else gradient for tensor, gradient in zip(tensors, gradients)]
    return (*found, *[None] * (_NUM_ARGUMENTS - _NUM_DIFFERENTIABLE + 2))


torch.library.register_autograd(
    f"{NAMESPACE}::chunk_kda_forward", _attention_autograd, setup_context=_attention_setup, lib=_library
)


_refuse_gradient("chunk_kda_backward", "a second derivative is not supported: call without create_graph")


# ---- segment summaries -----------------------------------------------------------------------------------------------


def _segment_summary(k, v, g, beta, A_log, dt_bias, chunk_table, segment_table, summary_offsets, *rest):
    num_summaries, *transforms, need_M, need_B = rest
    tables = (chunk_table, segment_table, summary_offsets)
    inputs = Inputs(None, k, v if need_B else None, g, beta, A_log, dt_bias, None, *tables, num_summaries)
    M, B = summarize(
        Pipeline(inputs, Transforms(1.0, *transforms), config.read("FAMILY")), need_M=need_M, need_B=need_B
    )
    return _present(M, k), _present(B, k)


def _segment_summary_fake(k, v, g, *rest):
    num_summaries, *_, need_M, need_B = rest[6:]
    shape = (num_summaries, g.shape[1], k.shape[2], k.shape[2])
    return tuple(k.new_empty(shape if needed else (0,), dtype=torch.float32) for needed in (need_M, need_B))


_define(
    "segment_summary(Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor chunk_table, "
    "Tensor segment_table, Tensor summary_offsets, int num_summaries, float? lower_bound, bool use_k_l2norm, "
    "str gate_form, str beta_form, bool need_M, bool need_B) -> (Tensor, Tensor)",
    _segment_summary,
    _segment_summary_fake,
)


_refuse_gradient("segment_summary", "detach its inputs; chunk_kda with states is differentiable")


# ---- convolution -----------------------------------------------------------------------------------------------------


def _conv_inputs(x, weight, bias, initial_state, cu_seqlens, use_silu) -> ConvInputs:
    state_dtype = x.dtype if initial_state is None else initial_state.dtype
    return ConvInputs(x, weight, bias, initial_state, cu_seqlens, use_silu, state_dtype)


def _conv_forward(x, weight, bias, initial_state, cu_seqlens, use_silu, output_final_state):
    inputs = _conv_inputs(x, weight, bias, initial_state, cu_seqlens, use_silu)
    y, final_state = conv_forward(inputs, output_final_state=output_final_state)
    return y, x.new_empty(0, dtype=inputs.state_dtype) if final_state is None else final_state


def _conv_forward_fake(x, weight, bias, initial_state, cu_seqlens, use_silu, output_final_state):
    inputs = _conv_inputs(x, weight, bias, initial_state, cu_seqlens, use_silu)
    shape = inputs.state_shape() if output_final_state else (0,)
    return x.new_empty(x.shape), x.new_empty(shape, dtype=inputs.state_dtype)


def _conv_backward(dy, dfinal_state, x, weight, bias, initial_state, cu_seqlens, use_silu):
    inputs = _conv_inputs(x, weight, bias, initial_state, cu_seqlens, use_silu)
    dx, dweight, dbias, dinitial_state = conv_backward(inputs, dy, dfinal_state)
    return dx, dweight, _present(dbias, x), _present(dinitial_state, x)


def _conv_backward_fake(dy, dfinal_state, x, weight, bias, initial_state, cu_seqlens, use_silu):
    return tuple(_present(None, x) if t is None else t.new_empty(t.shape) for t in (x, weight, bias, initial_state))


_define(
    f"causal_conv1d_forward({_CONV_INPUTS}bool use_silu, bool output_final_state) -> (Tensor, Tensor)",
    _conv_forward,
    _conv_forward_fake,
)
_define(
    f"causal_conv1d_backward(Tensor dy, Tensor? dfinal_state, {_CONV_INPUTS}bool use_silu)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _conv_backward,
    _conv_backward_fake,
)


def _conv_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    *tensors, ctx.use_silu, _ = inputs
    ctx.save_for_backward(*tensors)


def _conv_autograd(ctx, dy, dfinal_state):
    tensors = ctx.saved_tensors
    x = tensors[0]
    if dy is None:
        dy = x.new_zeros(()).expand(x.shape)
    if dfinal_state is not None:
        dfinal_state = dfinal_state.contiguous()
    gradients = torch.ops.cake_kda_jit.causal_conv1d_backward(dy, dfinal_state, *tensors, ctx.use_silu)
    found = [None if tensor is None else gradient for tensor, gradient in zip(tensors, gradients)]
    return (*found, None, None, None)


torch.library.register_autograd(
    f"{NAMESPACE}::causal_conv1d_forward", _conv_autograd, setup_context=_conv_setup, lib=_library
)


_refuse_gradient("causal_conv1d_backward", "a second derivative is not supported: call without create_graph")


# ---- transfer walk ---------------------------------------------------------------------------------------------------


def _walk(M, B, initial, offsets, variant, precision_mode, transpose):
    return walk(M, B, initial, offsets, variant=variant, precision_mode=precision_mode, transpose=transpose)


def _walk_fake(M, B, initial, offsets, variant, precision_mode, transpose):
    return torch.empty_like(B), B.new_empty((offsets.shape[0] - 1, *B.shape[1:]))


_define(
    "transfer_walk(Tensor M, Tensor B, Tensor? initial, Tensor offsets, str? variant, int precision_mode, "
    "bool transpose) -> (Tensor, Tensor)",
    _walk,
    _walk_fake,
)
_refuse_gradient("transfer_walk", "detach its inputs; the transposed walk, transpose=True, carries gradients")
