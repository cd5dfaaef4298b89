"""Every operation as a pair of functional torch.library operators with fake implementations.

Operators take tensors, ints, floats and strings only: a plan passes as its tables and its number of summaries. Where
outputs may be unwanted an operator returns a list of those that are not, in the schema's order: an empty tensor in
their place would cost the host as much as a real one.
"""

from __future__ import annotations

import torch

from .. import config
from .backward import chunk_backward
from .conv import ConvInputs, conv_backward, conv_forward
from .forward import CONTEXT_NAMES, Context, chunk_forward, context_dtype, context_shapes, kept_names
from .inputs import Inputs, Transforms, joined
from .operators import NAMESPACE, define, differentiate, refuse_gradient
from .pipeline import Pipeline
from .problem import KdaOptions
from .summary import summarize
from .walk import walk

OPERATORS = getattr(torch.ops, NAMESPACE)

_ATTENTION_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor chunk_table, Tensor segment_table, Tensor summary_offsets, SymInt num_summaries, "
    "bool has_spare_rows, "
)
_TRANSFORMS = "float scale, float? lower_bound, bool use_qk_l2norm, str gate_form, str beta_form, "
_OPTIONS = "str backward, int checkpoint_tokens, int? workspace_limit, str? family"
_CONV_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor cu_seqlens, bool has_spare_rows, "
_NUM_TENSORS = 11  # of the attention inputs; num_summaries and has_spare_rows follow them
_NUM_DIFFERENTIABLE = 8
_NUM_CONV_TENSORS = 5
_NUM_ARGUMENTS = 22  # inputs, transforms and options


def _present(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0, dtype=torch.float32) if tensor is None else tensor


# ---- attention -------------------------------------------------------------------------------------------------------


def _problem(arguments: tuple) -> tuple[Inputs, Transforms, KdaOptions]:
    q, k, v, g, beta, *rest = arguments[:13]
    transforms, options = arguments[13:18], arguments[18:_NUM_ARGUMENTS]
    inputs = Inputs(*(joined(tensor, 3) for tensor in (q, k, v, g)), joined(beta, 2), *rest)
    return inputs, Transforms(*transforms), KdaOptions(*options)


def _wanted(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _attention_forward(*arguments):
    inputs, transforms, options = _problem(arguments)
    output_final_state, keep = arguments[_NUM_ARGUMENTS:]
    pipeline = Pipeline(inputs, transforms, options.family)
    o, final_state, context = chunk_forward(pipeline, options, output_final_state=output_final_state, keep=keep)
    return _wanted(o, final_state, *(getattr(context, name) for name in CONTEXT_NAMES))


def _attention_forward_fake(*arguments):
    inputs, _, options = _problem(arguments)
    output_final_state, keep = arguments[_NUM_ARGUMENTS:]
    shapes = context_shapes(inputs, options.backward if keep else None, options.checkpoint_tokens)
    o = inputs.v.new_empty(inputs.v.shape)
    final_state = o.new_empty(inputs.state_shape(), dtype=torch.float32) if output_final_state else None
    kept = (o.new_empty(shape, dtype=context_dtype(name, shapes, o.device)) for name, shape in shapes.items())
    return _wanted(o, final_state, *kept)


def _attention_backward(do, dfinal_state, *rest):
    context, arguments = Context(*rest[: len(CONTEXT_NAMES)]), rest[len(CONTEXT_NAMES) :]
    inputs, transforms, options = _problem(arguments)
    pipeline = Pipeline(inputs, transforms, options.family)
    return _wanted(*vars(chunk_backward(pipeline, options, context, joined(do, 3), dfinal_state)).values())


def _attention_backward_fake(do, dfinal_state, *rest):
    tensors = rest[len(CONTEXT_NAMES) :][:_NUM_DIFFERENTIABLE]
    return [tensor.new_empty(tensor.shape) for tensor in tensors if tensor is not None]


define(  # o, final_state, and what is kept, in the order of CONTEXT_NAMES
    f"chunk_kda_forward({_ATTENTION_INPUTS}{_TRANSFORMS}{_OPTIONS}, bool output_final_state, bool keep) -> Tensor[]",
    _attention_forward,
    _attention_forward_fake,
)
define(  # the gradients of q to initial_state
    "chunk_kda_backward(Tensor do, Tensor? dfinal_state, "
    f"{''.join(f'Tensor? {name}, ' for name in CONTEXT_NAMES)}{_ATTENTION_INPUTS}{_TRANSFORMS}{_OPTIONS}) -> Tensor[]",
    _attention_backward,
    _attention_backward_fake,
)


def _attention_setup(ctx, inputs, output):
    # Without this, autograd would fill gradients of the kept tensors, as large as they are, with zeros.
    ctx.set_materialize_grads(False)
    ctx.options = inputs[_NUM_TENSORS:_NUM_ARGUMENTS]
    num_summaries, backward = inputs[_NUM_TENSORS], inputs[_NUM_ARGUMENTS - 4]
    ctx.has_final_state, keep = inputs[_NUM_ARGUMENTS:]
    names = kept_names(backward if keep else None, num_summaries)
    kept = dict(zip(names, output[1 + ctx.has_final_state :], strict=True))
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *map(kept.get, CONTEXT_NAMES))


def _attention_autograd(ctx, do, *gradients):
    saved = ctx.saved_tensors  # read once: under activation checkpointing a second reading is an error
    tensors, kept = saved[:_NUM_TENSORS], saved[_NUM_TENSORS:]
    dfinal_state = gradients[0] if ctx.has_final_state else None
    v = tensors[2]
    if do is None:
        do = v.new_zeros(()).expand(v.shape)
    if dfinal_state is not None:
        dfinal_state = dfinal_state.contiguous()
    found = iter(OPERATORS.chunk_kda_backward(do, dfinal_state, *kept, *tensors, *ctx.options))
    of_tensors = [None if tensor is None else next(found) for tensor in tensors[:_NUM_DIFFERENTIABLE]]
    return (*of_tensors, *[None] * (_NUM_ARGUMENTS - _NUM_DIFFERENTIABLE + 2))


differentiate("chunk_kda_forward", _attention_setup, _attention_autograd)


refuse_gradient("chunk_kda_backward", "a second derivative is not supported: call without create_graph")


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


define(
    "segment_summary(Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor chunk_table, "
    "Tensor segment_table, Tensor summary_offsets, SymInt num_summaries, float? lower_bound, bool use_k_l2norm, "
    "str gate_form, str beta_form, bool need_M, bool need_B) -> (Tensor, Tensor)",
    _segment_summary,
    _segment_summary_fake,
)


refuse_gradient("segment_summary", "detach its inputs; chunk_kda with states is differentiable")


# ---- convolution -----------------------------------------------------------------------------------------------------


def _conv_forward(x, *arguments):
    *rest, output_final_state = arguments
    return _wanted(*conv_forward(ConvInputs(joined(x, 2), *rest), output_final_state=output_final_state))


def _conv_forward_fake(*arguments):
    *inputs, output_final_state = arguments
    inputs = ConvInputs(*inputs)
    x = inputs.x
    final_state = x.new_empty(inputs.state_shape(), dtype=inputs.state_dtype) if output_final_state else None
    return _wanted(x.new_empty(x.shape), final_state)


def _conv_backward(dy, dfinal_state, x, *rest):
    return _wanted(*conv_backward(ConvInputs(joined(x, 2), *rest), joined(dy, 2), dfinal_state))


def _conv_backward_fake(dy, dfinal_state, x, weight, bias, initial_state, *_):
    return [tensor.new_empty(tensor.shape) for tensor in (x, weight, bias, initial_state) if tensor is not None]


define(  # y, final_state
    f"causal_conv1d_forward({_CONV_INPUTS}bool use_silu, bool output_final_state) -> Tensor[]",
    _conv_forward,
    _conv_forward_fake,
)
define(  # the gradients of x, weight, bias, initial_state
    f"causal_conv1d_backward(Tensor dy, Tensor? dfinal_state, {_CONV_INPUTS}bool use_silu) -> Tensor[]",
    _conv_backward,
    _conv_backward_fake,
)


def _conv_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    tensors, ctx.options = inputs[:_NUM_CONV_TENSORS], inputs[_NUM_CONV_TENSORS:-1]
    ctx.save_for_backward(*tensors)


def _conv_autograd(ctx, dy, dfinal_state=None):
    tensors = ctx.saved_tensors
    x = tensors[0]
    if dy is None:
        dy = x.new_zeros(()).expand(x.shape)
    if dfinal_state is not None:
        dfinal_state = dfinal_state.contiguous()
    found = iter(OPERATORS.causal_conv1d_backward(dy, dfinal_state, *tensors, *ctx.options))
    of_tensors = [None if tensor is None else next(found) for tensor in tensors[:-1]]
    return (*of_tensors, None, None, None, None)  # cu_seqlens, has_spare_rows, use_silu, output_final_state


differentiate("causal_conv1d_forward", _conv_setup, _conv_autograd)


refuse_gradient("causal_conv1d_backward", "a second derivative is not supported: call without create_graph")


# ---- transfer walk ---------------------------------------------------------------------------------------------------


def _walk(M, B, initial, offsets, variant, precision_mode, transpose):
    family = config.read("FAMILY")
    return walk(
        M, B, initial, offsets, variant=variant, precision_mode=precision_mode, transpose=transpose, family=family
    )


def _walk_fake(M, B, initial, offsets, variant, precision_mode, transpose):
    return torch.empty_like(B), B.new_empty((offsets.shape[0] - 1, *B.shape[1:]))


define(
    "transfer_walk(Tensor M, Tensor B, Tensor? initial, Tensor offsets, str? variant, int precision_mode, "
    "bool transpose) -> (Tensor, Tensor)",
    _walk,
    _walk_fake,
)
refuse_gradient("transfer_walk", "detach its inputs; the transposed walk, transpose=True, carries gradients")
