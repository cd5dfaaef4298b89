"""Every operation as a pair of functional torch.library operators with fake implementations.

Operators take tensors, ints, floats and strings only: a plan passes as its tables and its number of chunks. An output
that is not wanted is an empty tensor, because an operator's outputs are fixed by its schema.
"""

from __future__ import annotations

import torch

from ..runtime.launch import begin_call
from .backward import chunk_backward
from .conv import ConvInputs, conv_backward, conv_forward
from .forward import chunk_forward
from .values import Inputs, Transforms
from .walk import walk

NAMESPACE = "cake_kda_jit"

_ATTENTION_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor cu_seqlens, Tensor chunk_offsets, "
)
_ATTENTION_OPTIONS = (
    "int num_chunks, float scale, float? lower_bound, bool use_qk_l2norm, str gate_form, str beta_form, str? family"
)
_CONV_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor cu_seqlens, "
_NUM_INPUTS = 10
_NUM_OPTIONS = 7

_library = torch.library.Library(NAMESPACE, "DEF")


def _define(schema: str, implementation, fake) -> None:
    name = schema.split("(")[0]
    _library.define(schema)
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def _present(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0, dtype=torch.float32) if tensor is None else tensor


def _transforms(options: tuple) -> tuple[int, Transforms, str | None]:
    num_chunks, scale, lower_bound, use_qk_l2norm, gate_form, beta_form, family = options
    return num_chunks, Transforms(scale, lower_bound, use_qk_l2norm, gate_form, beta_form), family


# ---- attention -------------------------------------------------------------------------------------------------------


def _attention_forward(*arguments):
    begin_call()
    inputs = Inputs(*arguments[:_NUM_INPUTS])
    num_chunks, transforms, family = _transforms(arguments[_NUM_INPUTS : _NUM_INPUTS + _NUM_OPTIONS])
    output_final_state, keep_states = arguments[_NUM_INPUTS + _NUM_OPTIONS :]
    o, final_state, chunk_states = chunk_forward(
        inputs,
        transforms,
        num_chunks=num_chunks,
        output_final_state=output_final_state,
        keep_states=keep_states,
        family=family,
    )
    return o, _present(final_state, o), _present(chunk_states, o)


def _attention_forward_fake(*arguments):
    inputs = Inputs(*arguments[:_NUM_INPUTS])
    num_chunks = arguments[_NUM_INPUTS]
    output_final_state, keep_states = arguments[_NUM_INPUTS + _NUM_OPTIONS :]
    state_shape = inputs.state_shape()
    final_shape = state_shape if output_final_state else (0,)
    kept_shape = (num_chunks, *state_shape[1:]) if keep_states else (0,)
    return (
        inputs.v.new_empty(inputs.v.shape),
        inputs.v.new_empty(final_shape, dtype=torch.float32),
        inputs.v.new_empty(kept_shape, dtype=torch.float32),
    )


def _attention_backward(do, dfinal_state, chunk_states, *arguments):
    begin_call()
    inputs = Inputs(*arguments[:_NUM_INPUTS])
    num_chunks, transforms, family = _transforms(arguments[_NUM_INPUTS:])
    found = chunk_backward(
        inputs,
        transforms,
        do=do,
        dfinal_state=dfinal_state,
        chunk_states=chunk_states,
        num_chunks=num_chunks,
        family=family,
    )
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


def _attention_backward_fake(do, dfinal_state, chunk_states, *arguments):
    inputs = arguments[:8]
    return tuple(_present(None, do) if t is None else t.new_empty(t.shape) for t in inputs)


_define(
    f"chunk_kda_forward({_ATTENTION_INPUTS}{_ATTENTION_OPTIONS}, bool output_final_state, bool keep_states)"
    " -> (Tensor, Tensor, Tensor)",
    _attention_forward,
    _attention_forward_fake,
)
_define(
    "chunk_kda_backward(Tensor do, Tensor? dfinal_state, Tensor? chunk_states, "
    f"{_ATTENTION_INPUTS}{_ATTENTION_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _attention_backward,
    _attention_backward_fake,
)


def _attention_setup(ctx, inputs, output):
    # Without this, autograd would fill a gradient of the kept states, as large as they are, with zeros.
    ctx.set_materialize_grads(False)
    tensors = inputs[:_NUM_INPUTS]
    ctx.options = inputs[_NUM_INPUTS : _NUM_INPUTS + _NUM_OPTIONS]
    keep_states = inputs[-1]
    ctx.save_for_backward(*tensors, output[2] if keep_states else None)


def _attention_autograd(ctx, do, dfinal_state, _):
    *tensors, chunk_states = ctx.saved_tensors
    v = tensors[2]
    if do is None:
        do = v.new_zeros(()).expand(v.shape)
    if dfinal_state is not None:
        dfinal_state = dfinal_state.contiguous()
    gradients = torch.ops.cake_kda_jit.chunk_kda_backward(do, dfinal_state, chunk_states, *tensors, *ctx.options)
    found = [None if tensor is None else gradient for tensor, gradient in zip(tensors, gradients)]
    return (*found, *[None] * (2 + _NUM_OPTIONS + 2))


torch.library.register_autograd(
    f"{NAMESPACE}::chunk_kda_forward", _attention_autograd, setup_context=_attention_setup, lib=_library
)


# ---- convolution -----------------------------------------------------------------------------------------------------


def _conv_inputs(x, weight, bias, initial_state, cu_seqlens, use_silu) -> ConvInputs:
    state_dtype = x.dtype if initial_state is None else initial_state.dtype
    return ConvInputs(x, weight, bias, initial_state, cu_seqlens, use_silu, state_dtype)


def _conv_forward(x, weight, bias, initial_state, cu_seqlens, use_silu, output_final_state):
    begin_call()
    inputs = _conv_inputs(x, weight, bias, initial_state, cu_seqlens, use_silu)
    y, final_state = conv_forward(inputs, output_final_state=output_final_state)
    return y, x.new_empty(0, dtype=inputs.state_dtype) if final_state is None else final_state


def _conv_forward_fake(x, weight, bias, initial_state, cu_seqlens, use_silu, output_final_state):
    inputs = _conv_inputs(x, weight, bias, initial_state, cu_seqlens, use_silu)
    shape = inputs.state_shape() if output_final_state else (0,)
    return x.new_empty(x.shape), x.new_empty(shape, dtype=inputs.state_dtype)


def _conv_backward(dy, dfinal_state, x, weight, bias, initial_state, cu_seqlens, use_silu):
    begin_call()
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


# ---- transfer walk ---------------------------------------------------------------------------------------------------


def _walk(M, B, initial, offsets, variant, precision_mode, transpose):
    begin_call()
    return walk(M, B, initial, offsets, variant=variant, precision_mode=precision_mode, transpose=transpose)


def _walk_fake(M, B, initial, offsets, variant, precision_mode, transpose):
    return torch.empty_like(B), B.new_empty((offsets.shape[0] - 1, *B.shape[1:]))


_define(
    "transfer_walk(Tensor M, Tensor B, Tensor? initial, Tensor offsets, str? variant, int precision_mode, "
    "bool transpose) -> (Tensor, Tensor)",
    _walk,
    _walk_fake,
)
