"""Every operation as a pair of functional torch.library operators with fake implementations.

Operators take tensors, ints, floats and strings only: a plan passes as its tables and its number of summaries. Where
outputs may be unwanted an operator returns a list of those that are not, in the schema's order: an empty tensor in
their place would cost the host as much as a real one.
"""

from __future__ import annotations

import torch

from .. import config
from .calls import run_recorded
from .conv import ConvInputs
from .forward import CONTEXT_NAMES, context_dtype, context_shapes, kept_names
from .inputs import Inputs, Transforms, joined
from .operations import Attention, Convolution, GatedNorm, given_like, whole_direction
from .operators import NAMESPACE, define, differentiate, present, refuse_gradient, values_of, whole
from .pipeline import Pipeline
from .problem import KdaOptions
from .recorder import AT_ONCE
from .summary import summarize
from .walk import walk

OPERATORS = getattr(torch.ops, NAMESPACE)

_ATTENTION_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor chunk_table, Tensor segment_table, Tensor summary_offsets, SymInt num_summaries, "
    "bool has_spare_rows, "
)
_TRANSFORMS = "float scale, float? lower_bound, bool use_qk_l2norm, str gate_form, str beta_form, "
_OPTIONS = "str backward, int checkpoint_tokens, int? workspace_limit, str? family, bool keep_decayed_qk"
_CONV_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor cu_seqlens, bool has_spare_rows, "
_NUM_TENSORS = 11  # of the attention inputs; num_summaries and has_spare_rows follow them
_NUM_DIFFERENTIABLE = 8
_NUM_STRIDED = 5  # q, k, v, g and beta; all others are contiguous
_NUM_CONV_TENSORS = 5
_FIRST_OPTION = 18
_NUM_ARGUMENTS = 23  # inputs, transforms and options


# ---- attention -------------------------------------------------------------------------------------------------------


def _problem(arguments: tuple, output_final_state: bool = False) -> tuple[Attention, tuple]:
    """The operation of flat arguments, and its tensors."""
    num_summaries, has_spare_rows = arguments[_NUM_TENSORS:13]
    transforms = Transforms(*arguments[13:_FIRST_OPTION])
    options = KdaOptions(*arguments[_FIRST_OPTION:_NUM_ARGUMENTS])
    operation = Attention(num_summaries, has_spare_rows, transforms, options, output_final_state)
    return operation, operation.join(arguments[:_NUM_TENSORS])


def _wanted(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _attention_forward(*arguments):
    output_final_state, keep = arguments[_NUM_ARGUMENTS:]
    operation, tensors = _problem(arguments, output_final_state)

    def forward(executor, tensors):
        outputs, kept = operation.forward(executor, tensors, keep=keep)
        return *outputs, *kept.values()

    return _wanted(*run_recorded(f"forward, keep={keep}", operation, tensors, forward))


def _attention_forward_fake(*arguments):
    output_final_state, keep = arguments[_NUM_ARGUMENTS:]
    operation, tensors = _problem(arguments)
    inputs = operation.inputs(AT_ONCE, tensors)
    shapes = context_shapes(inputs, operation.options if keep else None)
    o = inputs.v.new_empty(inputs.v.shape)
    final_state = o.new_empty(inputs.state_shape(), dtype=torch.float32) if output_final_state else None
    kept = (o.new_empty(shape, dtype=context_dtype(name, shapes, o.device)) for name, shape in shapes.items())
    return _wanted(o, final_state, *kept)


def _attention_backward(do, dfinal_state, *rest):
    kept, arguments = rest[: len(CONTEXT_NAMES)], rest[len(CONTEXT_NAMES) :]
    operation, tensors = _problem(arguments)

    def backward(executor, everything):
        *given, do, dfinal_state = everything
        kept = dict(zip(CONTEXT_NAMES, given[_NUM_TENSORS:]))
        return operation.backward(executor, tuple(given[:_NUM_TENSORS]), kept, (do, dfinal_state))

    return _wanted(*run_recorded("backward", operation, (*tensors, *kept, joined(do, 3), dfinal_state), backward))


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
    options = KdaOptions(*inputs[_FIRST_OPTION:_NUM_ARGUMENTS])
    ctx.has_final_state, keep = inputs[_NUM_ARGUMENTS:]
    names = kept_names(options if keep else None, inputs[_NUM_TENSORS])
    kept = dict(zip(names, output[1 + ctx.has_final_state :], strict=True))
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *map(kept.get, CONTEXT_NAMES))


def _attention_autograd(ctx, do, *gradients):
    saved = ctx.saved_tensors  # read once: under activation checkpointing a second reading is an error
    saved = (*saved[:_NUM_STRIDED], *whole(saved[_NUM_STRIDED:]))
    tensors, kept = saved[:_NUM_TENSORS], saved[_NUM_TENSORS:]
    dfinal_state = gradients[0] if ctx.has_final_state else None
    do, dfinal_state = given_like(do, tensors[2]), whole_direction(dfinal_state)
    found = iter(OPERATORS.chunk_kda_backward(do, dfinal_state, *kept, *tensors, *ctx.options))
    of_tensors = [None if tensor is None else next(found) for tensor in tensors[:_NUM_DIFFERENTIABLE]]
    return (*of_tensors, *[None] * (_NUM_ARGUMENTS - _NUM_DIFFERENTIABLE + 2))


differentiate("chunk_kda_forward", _attention_setup, _attention_autograd)
refuse_gradient("chunk_kda_backward")


def attend(operation: Attention, tensors: tuple) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the operator of an attention on its tensors; returns o and final_state."""
    keep = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)
    o, *others = OPERATORS.chunk_kda_forward(
        *tensors,
        operation.num_summaries,
        operation.has_spare_rows,
        *values_of(operation.transforms),
        *values_of(operation.options),
        operation.output_final_state,
        keep,
    )
    return o, others[0] if operation.output_final_state else None


# ---- segment summaries -----------------------------------------------------------------------------------------------


def _segment_summary(k, v, g, beta, A_log, dt_bias, chunk_table, segment_table, summary_offsets, *rest):
    num_summaries, *transforms, need_M, need_B = rest
    tables = (chunk_table, segment_table, summary_offsets)
    inputs = Inputs(None, k, v if need_B else None, g, beta, A_log, dt_bias, None, *tables, num_summaries)
    M, B = summarize(
        Pipeline(inputs, Transforms(1.0, *transforms), config.read("FAMILY")), need_M=need_M, need_B=need_B
    )
    return present(M, k), present(B, k)


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


def _conv_forward(*arguments):
    operation = Convolution(*arguments[_NUM_CONV_TENSORS:])

    def forward(executor, tensors):
        return operation.forward(executor, tensors, keep=False)[0]

    return _wanted(*run_recorded("forward", operation, operation.join(arguments[:_NUM_CONV_TENSORS]), forward))


def _conv_forward_fake(*arguments):
    *inputs, output_final_state = arguments
    inputs = ConvInputs(*inputs)
    x = inputs.x
    final_state = x.new_empty(inputs.state_shape(), dtype=inputs.state_dtype) if output_final_state else None
    return _wanted(x.new_empty(x.shape), final_state)


def _conv_backward(dy, dfinal_state, *arguments):
    operation = Convolution(*arguments[_NUM_CONV_TENSORS:])
    tensors = operation.join(arguments[:_NUM_CONV_TENSORS])

    def backward(executor, everything):
        *given, dy, dfinal_state = everything
        return operation.backward(executor, tuple(given), {}, (dy, dfinal_state))

    return _wanted(*run_recorded("backward", operation, (*tensors, joined(dy, 2), dfinal_state), backward))


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
    x, *others = ctx.saved_tensors
    tensors = (x, *whole(others))
    dy, dfinal_state = given_like(dy, x), whole_direction(dfinal_state)
    found = iter(OPERATORS.causal_conv1d_backward(dy, dfinal_state, *tensors, *ctx.options))
    of_tensors = [None if tensor is None else next(found) for tensor in tensors[:-1]]
    return (*of_tensors, None, None, None, None)  # cu_seqlens, has_spare_rows, use_silu, output_final_state


differentiate("causal_conv1d_forward", _conv_setup, _conv_autograd)
refuse_gradient("causal_conv1d_backward")


def convolve(operation: Convolution, tensors: tuple) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the operator of a convolution on its tensors; returns y and final_state."""
    y, *others = OPERATORS.causal_conv1d_forward(*tensors, *values_of(operation))
    return y, others[0] if operation.output_final_state else None


# ---- gated norm ------------------------------------------------------------------------------------------------------


def _norm_forward(x, gate, weight, eps):
    operation = GatedNorm(eps)

    def forward(executor, tensors):
        return operation.forward(executor, tensors, keep=False)[0]

    [y] = run_recorded("forward", operation, operation.join((x, gate, weight)), forward)
    return y


def _norm_forward_fake(x, gate, weight, eps):
    return gate.new_empty(gate.shape)


def _norm_backward(dy, x, gate, weight, eps):
    operation = GatedNorm(eps)
    tensors = operation.join((x, gate, weight))

    def backward(executor, everything):
        *given, dy = everything
        return operation.backward(executor, tuple(given), {}, (dy,))

    return tuple(run_recorded("backward", operation, (*tensors, *operation.complete(tensors, (dy,))), backward))


def _norm_backward_fake(dy, x, gate, weight, eps):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (x, gate, weight))


_NORM_INPUTS = "Tensor x, Tensor gate, Tensor weight, float eps"

define(f"gated_rms_norm_forward({_NORM_INPUTS}) -> Tensor", _norm_forward, _norm_forward_fake)
define(
    f"gated_rms_norm_backward(Tensor dy, {_NORM_INPUTS}) -> (Tensor, Tensor, Tensor)",
    _norm_backward,
    _norm_backward_fake,
)


def _norm_setup(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _norm_autograd(ctx, dy):
    x, gate, weight = ctx.saved_tensors
    return *OPERATORS.gated_rms_norm_backward(dy, x, gate, weight.contiguous(), ctx.eps), None


differentiate("gated_rms_norm_forward", _norm_setup, _norm_autograd)
refuse_gradient("gated_rms_norm_backward")


def normalize(operation: GatedNorm, tensors: tuple) -> torch.Tensor:
    """Call the operator of a gated norm on its tensors; returns y."""
    return OPERATORS.gated_rms_norm_forward(*tensors, *values_of(operation))


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
