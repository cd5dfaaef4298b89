"""The context-parallel operations as functional torch.library operators: contexts pass as an integer handle."""

from __future__ import annotations

import torch

from ..ops.calls import is_eager, node
from ..ops.forward import CONTEXT_NAMES, Context, context_dtype, context_shapes
from ..ops.inputs import Inputs, joined
from ..ops.keys import are_plain
from ..ops.operations import given_like, whole_direction
from ..ops.operators import NAMESPACE, define, differentiate, present, refuse_gradient, untraced, whole
from ..ops.problem import KdaOptions
from ..runtime.launch import operation
from .backward import parallel_backward
from .context import KcpContext, get_context
from .conv import ConvTensors, parallel_conv_backward, parallel_conv_forward
from .forward import parallel_forward
from .passes import make_pass
from .whole import gather_tokens, scatter_sum

OPERATORS = getattr(torch.ops, NAMESPACE)

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
)
# A context passes as its handle and the sizes that its operators' outputs have: a graph that was compiled with another
# context of other sizes serves it too.
_OPTIONS = (
    "SymInt context, SymInt num_documents, SymInt num_chunks, SymInt num_segments, SymInt num_summaries, "
    "float scale, float? lower_bound, bool use_qk_l2norm, str gate_form, str beta_form, "
    "str backward, int checkpoint_tokens, bool keep_decayed_qk"
)
_NUM_TENSORS = 8
_NUM_STRIDED = 5  # q, k, v, g and beta; all others are contiguous
_FIRST_TRANSFORM, _END_TRANSFORM = 13, 18
_NUM_ARGUMENTS = 21  # tensors, sizes, transforms, and the options that say what is kept
_CONV_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, "
_CONV_SIZES = "SymInt context, SymInt num_documents, SymInt num_entered"
_NUM_CONV_TENSORS = 4
_SHORT_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor q_weight, Tensor k_weight, Tensor v_weight, "
    "SymInt context, SymInt num_entered"
)
_NUM_SHORT = 3


def _given(tensor: torch.Tensor | None, input_: torch.Tensor | None) -> torch.Tensor | None:
    return None if input_ is None else tensor


def _wanted(dfinal_state: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of the final states, None where they were not wanted and an empty tensor stands for them."""
    return None if dfinal_state is None or dfinal_state.numel() == 0 else whole_direction(dfinal_state)


def _kept_alive(handle: int | torch.SymInt) -> KcpContext | None:
    """What a graph of autograd must keep; a traced one has no context yet, and who calls it keeps its own."""
    return get_context(handle) if isinstance(handle, int) else None


# ---- attention -------------------------------------------------------------------------------------------------------


def _split(arguments) -> tuple[KcpContext, tuple, tuple]:
    """Context, tensors and transforms of an operator's arguments."""
    q, k, v, g, beta, *others = arguments[:_NUM_TENSORS]
    tensors = (*(joined(tensor, 3) for tensor in (q, k, v, g)), joined(beta, 2), *others)
    return get_context(arguments[_NUM_TENSORS]), tensors, arguments[_FIRST_TRANSFORM:_END_TRANSFORM]


def _attend(*arguments) -> tuple[torch.Tensor, torch.Tensor | None, Context]:
    output_final_state, keep = arguments[_NUM_ARGUMENTS:]
    call = make_pass(*_split(arguments), backward=False)
    return parallel_forward(call, output_final_state=output_final_state, keep=keep)


def _forward(*arguments):
    o, final_state, context = _attend(*arguments)
    kept = (getattr(context, name) for name in CONTEXT_NAMES)
    return o, *(present(tensor, o) for tensor in (final_state, *kept))


def _forward_fake(*arguments):
    q, k, v, g, beta, *others = arguments[:_NUM_TENSORS]
    num_documents, num_chunks, num_segments, num_summaries = arguments[_NUM_TENSORS + 1 : _FIRST_TRANSFORM]
    backward, checkpoint_tokens, keep_decayed_qk, output_final_state, keep = arguments[_END_TRANSFORM:]
    options = KdaOptions(backward, checkpoint_tokens, keep_decayed_qk=keep_decayed_qk)
    chunk_table, segment_table = (q.new_empty((size, 4), dtype=torch.int32) for size in (num_chunks, num_segments))
    joined_ = (*(joined(tensor, 3) for tensor in (q, k, v, g)), joined(beta, 2))
    inputs = Inputs(*joined_, *others, chunk_table, segment_table, chunk_table, num_summaries, False)
    shapes = context_shapes(inputs, options if keep else None)
    o = inputs.v.new_empty(inputs.v.shape)
    state = (num_documents, inputs.num_value_heads, inputs.head_dim, inputs.head_dim)
    kept = (o.new_empty(shapes.get(name, (0,)), dtype=context_dtype(name, shapes, o.device)) for name in CONTEXT_NAMES)
    return o, o.new_empty(state if output_final_state else (0,), dtype=torch.float32), *kept


def _backward(do, dfinal_state, *rest):
    context, arguments = Context(*rest[: len(CONTEXT_NAMES)]), rest[len(CONTEXT_NAMES) :]
    call = make_pass(*_split(arguments), backward=True, do=joined(do, 3))
    found = parallel_backward(call, context, dfinal_state)
    others = (found.dA_log, found.ddt_bias, found.dinitial_state)
    return found.dq, found.dk, found.dv, found.dg, found.dbeta, *(present(tensor, do) for tensor in others)


def _backward_fake(do, dfinal_state, *rest):
    tensors = rest[len(CONTEXT_NAMES) :][:_NUM_TENSORS]
    return tuple(present(None, do) if tensor is None else tensor.new_empty(tensor.shape) for tensor in tensors)


define(
    f"kcp_chunk_kda_forward({_TENSORS}{_OPTIONS}, bool output_final_state, bool keep)"
    f" -> (Tensor, Tensor{', Tensor' * len(CONTEXT_NAMES)})",
    _forward,
    _forward_fake,
)
define(
    "kcp_chunk_kda_backward(Tensor do, Tensor? dfinal_state, "
    f"{''.join(f'Tensor? {name}, ' for name in CONTEXT_NAMES)}{_TENSORS}{_OPTIONS})"
    f" -> (Tensor{', Tensor' * (_NUM_TENSORS - 1)})",
    _backward,
    _backward_fake,
)


def _setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.options = inputs[_NUM_TENSORS:_NUM_ARGUMENTS]
    ctx.alive = _kept_alive(ctx.options[0])
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *(tensor if tensor.numel() else None for tensor in output[2:]))


def _autograd(ctx, do, dfinal_state, *_):
    saved = ctx.saved_tensors  # read once: under activation checkpointing a second reading is an error
    saved = (*saved[:_NUM_STRIDED], *whole(saved[_NUM_STRIDED:]))
    tensors, kept = saved[:_NUM_TENSORS], saved[_NUM_TENSORS:]
    arguments = (given_like(do, tensors[2]), _wanted(dfinal_state), *kept, *tensors, *ctx.options)
    if is_eager() and not torch.is_grad_enabled():
        with operation():
            gradients = _backward(*arguments)
    else:
        gradients = OPERATORS.kcp_chunk_kda_backward(*arguments)
    return (*map(_given, gradients, tensors), *[None] * (_NUM_ARGUMENTS - _NUM_TENSORS + 2))


differentiate("kcp_chunk_kda_forward", _setup, _autograd)


class _Attention(torch.autograd.Function):
    """The operator without the dispatcher, which takes the host as long as the launches of a forward."""

    @staticmethod
    def forward(ctx, rest, *tensors):
        with operation():
            o, final_state, context = _attend(*tensors, *rest)
        ctx.set_materialize_grads(False)
        ctx.options = rest[: _NUM_ARGUMENTS - _NUM_TENSORS]
        ctx.alive = _kept_alive(rest[0])
        ctx.save_for_backward(*tensors, *(getattr(context, name) for name in CONTEXT_NAMES))
        return o, final_state

    @staticmethod
    @untraced
    def backward(ctx, do, dfinal_state):
        return None, *_autograd(ctx, do, dfinal_state)[:_NUM_TENSORS]


_apply_attention = node("kcp_chunk_kda", _Attention)


def attend(arguments: tuple, *, output_final_state: bool, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the forward's operator, or what it does where nobody looks; ``arguments`` are its tensors and options."""
    tensors, rest = arguments[:_NUM_TENSORS], (*arguments[_NUM_TENSORS:], output_final_state, keep)
    if not (is_eager() and are_plain(tensors)):
        o, final_state, *_ = OPERATORS.kcp_chunk_kda_forward(*tensors, *rest)
        return o, final_state
    if keep:
        return _apply_attention(rest, *tensors)
    with operation():
        o, final_state, _ = _attend(*tensors, *rest)
    return o, final_state


refuse_gradient("kcp_chunk_kda_backward")


# ---- convolution -----------------------------------------------------------------------------------------------------


def _conv_forward(x, weight, bias, initial_state, *rest):
    handle, *_, use_silu, output_final_state = rest
    tensors = ConvTensors(x[0], weight, bias, initial_state)
    (found,), halo = parallel_conv_forward(get_context(handle), [tensors], use_silu, output_final_state)
    return found.y.view(x.shape), present(found.final_state, x), halo


def _conv_forward_fake(x, weight, bias, initial_state, *rest):
    _, num_documents, num_entered, _, output_final_state = rest
    state_shape = (x.shape[-1], weight.shape[1] - 1)
    dtype = x.dtype if initial_state is None else initial_state.dtype
    final_state = x.new_empty((num_documents, *state_shape), dtype=dtype) if output_final_state else None
    halo = x.new_empty((num_entered, *state_shape), dtype=torch.float32)
    return x.new_empty(x.shape), present(final_state, x), halo


def _conv_backward(dy, dfinal_state, halo, *rest):
    (x, *others), (handle, *_, use_silu) = rest[:_NUM_CONV_TENSORS], rest[_NUM_CONV_TENSORS:]
    tensors = ConvTensors(x[0], *others)
    (found,) = parallel_conv_backward(get_context(handle), [dy[0]], dfinal_state, halo, [tensors], use_silu)
    return found.x.view(x.shape), found.weight, present(found.bias, x), present(found.initial_state, x)


def _conv_backward_fake(dy, dfinal_state, halo, *rest):
    x, tensors = rest[0], rest[:_NUM_CONV_TENSORS]
    return tuple(present(None, x) if tensor is None else tensor.new_empty(tensor.shape) for tensor in tensors)


define(
    f"kcp_causal_conv1d_forward({_CONV_TENSORS}{_CONV_SIZES}, bool use_silu, bool output_final_state)"
    " -> (Tensor, Tensor, Tensor)",
    _conv_forward,
    _conv_forward_fake,
)
define(
    f"kcp_causal_conv1d_backward(Tensor dy, Tensor? dfinal_state, Tensor halo, {_CONV_TENSORS}{_CONV_SIZES}, "
    "bool use_silu) -> (Tensor, Tensor, Tensor, Tensor)",
    _conv_backward,
    _conv_backward_fake,
)


def _conv_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.options = inputs[_NUM_CONV_TENSORS:-1]
    ctx.alive = _kept_alive(ctx.options[0])
    ctx.save_for_backward(output[2], *inputs[:_NUM_CONV_TENSORS])


def _conv_autograd(ctx, dy, dfinal_state, _):
    halo, x, *others = ctx.saved_tensors
    tensors = (x, *whole(others))
    dy, dfinal_state = given_like(dy, x), _wanted(dfinal_state)
    gradients = OPERATORS.kcp_causal_conv1d_backward(dy, dfinal_state, halo.contiguous(), *tensors, *ctx.options)
    return (*map(_given, gradients, tensors), *[None] * 5)  # sizes, use_silu, output_final_state


differentiate("kcp_causal_conv1d_forward", _conv_setup, _conv_autograd)
refuse_gradient("kcp_causal_conv1d_backward")


# ---- the three convolutions of a layer, with SiLU: one exchange ------------------------------------------------------


def _short_tensors(arguments) -> list[ConvTensors]:
    rows, weights = arguments[:_NUM_SHORT], arguments[_NUM_SHORT : 2 * _NUM_SHORT]
    return [ConvTensors(x[0], weight, None, None) for x, weight in zip(rows, weights)]


def _short_forward(*arguments):
    ctx = get_context(arguments[2 * _NUM_SHORT])
    found, halo = parallel_conv_forward(ctx, _short_tensors(arguments), use_silu=True, output_final_state=False)
    return *(one.y.view(x.shape) for one, x in zip(found, arguments)), halo


def _short_forward_fake(*arguments):
    rows, num_entered, width = arguments[:_NUM_SHORT], arguments[-1], arguments[_NUM_SHORT].shape[1]
    halo = (num_entered, sum(x.shape[2] for x in rows), width - 1)
    return *(x.new_empty(x.shape) for x in rows), rows[0].new_empty(halo, dtype=torch.float32)


def _short_backward(*arguments):
    all_dy, halo, rest = arguments[:_NUM_SHORT], arguments[_NUM_SHORT], arguments[_NUM_SHORT + 1 :]
    ctx, tensors = get_context(rest[2 * _NUM_SHORT]), _short_tensors(rest)
    found = parallel_conv_backward(ctx, [dy[0] for dy in all_dy], None, halo, tensors, use_silu=True)
    return *(one.x.view(dy.shape) for one, dy in zip(found, all_dy)), *(one.weight for one in found)


def _short_backward_fake(*arguments):
    return tuple(tensor.new_empty(tensor.shape) for tensor in arguments[_NUM_SHORT + 1 :][: 2 * _NUM_SHORT])


define(
    f"kcp_short_convolutions_forward({_SHORT_TENSORS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _short_forward,
    _short_forward_fake,
)
define(
    f"kcp_short_convolutions_backward(Tensor dq, Tensor dk, Tensor dv, Tensor halo, {_SHORT_TENSORS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _short_backward,
    _short_backward_fake,
)


def _short_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.sizes = inputs[2 * _NUM_SHORT :]
    ctx.alive = _kept_alive(ctx.sizes[0])
    ctx.save_for_backward(output[_NUM_SHORT], *inputs[: 2 * _NUM_SHORT])


def _short_autograd(ctx, *gradients):
    halo, *tensors = ctx.saved_tensors
    rows, weights = tensors[:_NUM_SHORT], whole(tensors[_NUM_SHORT:])
    all_dy = [given_like(dy, x) for dy, x in zip(gradients, rows)]
    return OPERATORS.kcp_short_convolutions_backward(*all_dy, halo.contiguous(), *rows, *weights, *ctx.sizes)


differentiate("kcp_short_convolutions_forward", _short_setup, _short_autograd)
refuse_gradient("kcp_short_convolutions_backward")


# ---- tokens of all ranks ---------------------------------------------------------------------------------------------


def _gather(x, handle, dim, _tokens, _local_tokens):
    return gather_tokens(get_context(handle), x, dim)


def _gather_fake(x, handle, dim, num_tokens, _local_tokens):
    return x.new_empty([*x.shape[:dim], num_tokens, *x.shape[dim + 1 :]])


def _scatter_sum(dx, handle, dim, _local_tokens):
    return scatter_sum(get_context(handle), dx, dim)


def _scatter_sum_fake(dx, handle, dim, num_local_tokens):
    return dx.new_empty([*dx.shape[:dim], num_local_tokens, *dx.shape[dim + 1 :]])


define(
    "kcp_gather(Tensor x, SymInt context, int dim, SymInt num_tokens, SymInt num_local_tokens) -> Tensor",
    _gather,
    _gather_fake,
)
define(
    "kcp_scatter_sum(Tensor dx, SymInt context, int dim, SymInt num_local_tokens) -> Tensor",
    _scatter_sum,
    _scatter_sum_fake,
)


def _gather_setup(ctx, inputs, output):
    handle, dim, _, num_local_tokens = inputs[1:]
    ctx.options = (handle, dim, num_local_tokens)
    ctx.alive = _kept_alive(handle)


def _gather_autograd(ctx, dx):
    return OPERATORS.kcp_scatter_sum(dx, *ctx.options), None, None, None, None


differentiate("kcp_gather", _gather_setup, _gather_autograd)
refuse_gradient("kcp_scatter_sum")
