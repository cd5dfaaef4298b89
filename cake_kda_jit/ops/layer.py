"""A whole layer as one prepared call: torch's products around what lies between them, and one node of autograd.

Torch makes a node of each product, hands its gradients around, and adds up those of the layer's input in kernels of
their own, which takes its host longer than the products. Here the backward calls the products itself, in the order of
torch's engine. Results and gradients are those of the modules one by one, bit for bit, except for the input's gradient:
its products are added up by torch's products themselves, not behind them, and may be rounded otherwise on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch.nn import functional

from . import calls, checks
from .between import LayerForm, checked_operation
from .calls import Call
from .operations import BetweenProjections
from .operators import any_requires_grad, refused_again, untraced
from .plan import Plan, tables_of_batch
from .problem import KdaOptions
from .recorder import layout_of

NAME = "kimi_delta_attention"
GIVEN = BetweenProjections.have_tokens
OTHERS = tuple(number for number in range(BetweenProjections.num_differentiable) if number not in GIVEN)
"""Of the tensors of ``BetweenProjections``, those that products give, and those between x and the weights."""

NUM_OTHERS = len(OTHERS)
NUM_TABLES = 4


class Products(NamedTuple):
    """A layer's projections but the last, in order: the source of each is 0 for x, else the number of another.

    ``given`` are the numbers of those that become q, k, v, and the logits of decay, beta and output gate, in the order
    of ``GIVEN``.
    """

    sources: tuple[int, ...]
    given: tuple[int, ...]


LOW_RANK = Products(sources=(0, 0, 0, 0, 4, 0, 0, 7), given=(1, 2, 3, 5, 6, 8))
FULL_RANK = Products(sources=(0, 0, 0, 0, 0, 0), given=(1, 2, 3, 4, 5, 6))


def attention_layer(
    tensors: tuple[torch.Tensor, ...],
    products: Products,
    form: LayerForm,
    *,
    plan: Plan | None,
    options: KdaOptions | None,
) -> torch.Tensor | None:
    """Return the layer's ``[B, T, hidden]``.

    The tensors are x ``[B, T, hidden]``; the weights of the three convolutions ``[D, 1, W]``, A_log, dt_bias, the
    norm's weight; the weights of the products and of the last projection ``[out, in]``; and, if there is one, the bias
    of the last of the products. Without a plan there are B documents. Only in eager mode, and not under autocast.

    Returns None where x, the projections' weights and the bias differ in dtype or device or do not fit, where x is not
    contiguous or of a dtype that kernels do not take, and where ``between_projections`` would return None. Errors are
    those of ``causal_conv1d``, ``chunk_kda`` and ``gated_rms_norm``.
    """
    x = tensors[0]
    asked = (NAME, plan, tensors, len(products.sources), *form, options)
    call = calls.find_call(*asked)
    if call is None:
        call = calls.keep_call(asked, partial(_make, tensors, products, form, plan, options))
        if call is None:
            return None
    pack = plan or tables_of_batch(*x.shape[:2], call.num_value_heads, form.head_dim, x.device)
    return call(tensors, (*pack.tables, pack.cu_seqlens))


class LayerCall:
    """A layer on tensors of fixed layouts; ``between`` is what lies between its projections, on ``[B * T, D]``.

    What is kept for a backward are the parameters, in the order of the tensors, the tables, x, the matrices of the
    products, what the last projection takes, and what ``between`` keeps.
    """

    def __init__(self, products: Products, between: Call, tensors: Sequence[torch.Tensor]) -> None:
        self.sources, self.given, self.between = products.sources, products.given, between
        between.name = NAME
        self.last_first = tuple(enumerate(products.sources))[::-1]
        first_table = len(tensors) - 1
        self.weights = slice(NUM_OTHERS, NUM_OTHERS + len(products.sources) + 1)
        self.has_bias = self.weights.stop < first_table
        self.first_result = first_table + NUM_TABLES  # x, then those of the products
        self.number_of_y = self.first_result + 1 + len(products.sources)
        given = (self.first_result + number for number in products.given)
        tables = range(first_table, self.first_result)
        self.operands = itemgetter(*_arranged(given, range(NUM_OTHERS)), *tables)  # of what is kept
        x, weights = tensors[0], tensors[1:][self.weights]
        self.o_weight = layout_of(weights[-1])
        rows, (hidden, channels) = x.shape[:2].numel(), weights[-1].shape
        self.x_shape, self.flat_x_shape = tuple(x.shape), (rows, x.shape[2])
        self.y_shape, self.flat_o_shape = (*x.shape[:2], channels), (rows, hidden)
        self.num_value_heads = weights[products.given[4] - 1].shape[0]

    def __call__(self, tensors: tuple[torch.Tensor, ...], tables: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Run the layer; returns its output, with its gradient where one is wanted."""
        if torch.is_grad_enabled() and any_requires_grad(*tensors):
            return _apply(self, tables, *tensors)
        return self.forward(tensors[0], (*tensors[1:], *tables), keep=False)[0]

    def forward(self, x: torch.Tensor, kept: tuple[torch.Tensor, ...], *, keep: bool) -> tuple[torch.Tensor, tuple]:
        """Return the output and all that is kept; ``kept`` are the parameters and the tables."""
        results, linear = [x.view(self.flat_x_shape)], functional.linear
        *weights, last, o_weight = kept[self.weights]
        for source, weight in zip(self.sources, weights):
            results.append(linear(results[source], weight))
        results.append(linear(results[self.sources[-1]], last, kept[self.weights.stop] if self.has_bias else None))
        kept = (*kept, x, *results[1:])
        [y], more = self.between.forward(keep=keep).run(self.operands(kept))
        # Not a view of the product: torch refuses to change a node's output in place where that is a view.
        return linear(y.view(self.y_shape), o_weight), (*kept, y, *more)

    def wanted(self, needed: Sequence[bool], kept: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
        """Return what is kept, None for what only gradients that are not ``needed`` read: it may change or go.

        Parameters stay, and x where its gradient is needed: through them a second derivative finds the node that
        refuses it.
        """
        *needs_products, needs_last = needed[1:][self.weights]
        read = {source for source, needs in zip((0, *self.sources), (needed[0], *needs_products)) if needs}
        unread = {self.first_result + number for number in {*self.sources}.difference(self.given, read)}
        if not needs_last:
            unread.add(self.number_of_y)
        return tuple(None if number in unread else one for number, one in enumerate(kept))

    def gradients(self, needed: Sequence[bool], do: torch.Tensor, *kept: torch.Tensor | None) -> tuple:
        """Return the gradients of the tensors, None for those that are not ``needed``; ``kept`` is what is wanted."""
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(do.device.type):
            with torch.autocast(do.device.type, enabled=False):  # as in the forward
                return self.gradients(needed, do, *kept)
        needs_x, needs_weights, weights = needed[0], needed[1:][self.weights], kept[self.weights]
        (x, *results), (y, *more) = kept[self.first_result : self.number_of_y], kept[self.number_of_y :]
        results.insert(0, None if x is None else x.flatten(0, 1))
        do = do.reshape(self.flat_o_shape)
        d_weights: list[torch.Tensor | None] = [None] * len(weights)
        if needs_weights[-1]:
            d_weights[-1] = torch.mm(do.t(), y)
        if weights[-1].shape != self.o_weight.shape:  # a pass would read its product as what it is not
            self.between.refuse_saved(weights[-1], self.o_weight)
        dy = torch.mm(do, weights[-1])
        found = self.between.gradients((*self.operands(kept), *more), (dy,))
        directions: list[torch.Tensor | None] = [None] * len(weights)
        for number, place in zip(self.given, GIVEN):
            directions[number] = found[place]
        d_others = _of_others(found)
        d_bias = (directions[-1].sum(0) if needed[-1] else None,) if self.has_bias else ()
        del found
        for number, source in self.last_first:
            direction = directions.pop()  # whose memory is free behind its products
            if needs_weights[number]:
                d_weights[number] = torch.mm(direction.t(), results[source])
            if source == 0 and not needs_x:
                continue
            known = directions[source]
            if known is None:
                directions[source] = torch.mm(direction, weights[number])
            else:
                torch.addmm(known, direction, weights[number], out=known)
        dx = directions[0].view(self.x_shape) if needs_x else None
        return dx, *d_others, *d_weights, *d_bias


def _arranged(given: Iterable, others: Iterable) -> tuple:
    """What products give, and the others, in the order of the tensors of ``BetweenProjections``."""
    placed = dict(zip(GIVEN, given)) | dict(zip(OTHERS, others))
    return tuple(placed[number] for number in sorted(placed))


_of_others = itemgetter(*OTHERS)


def _make(
    tensors: tuple[torch.Tensor, ...],
    products: Products,
    form: LayerForm,
    plan: Plan | None,
    options: KdaOptions | None,
) -> LayerCall | None:
    """Return the call, or None where ``attention_layer`` returns it."""
    end = 1 + NUM_OTHERS + len(products.sources) + 1
    x, others, weights, bias = tensors[0], tensors[1 : 1 + NUM_OTHERS], tensors[1 + NUM_OTHERS : end], tensors[end:]
    if x.dim() != 3 or not x.is_contiguous() or not checks.is_kernel_dtype(x.dtype, x.device):
        return None
    sizes = [x.shape[-1]]
    for source, weight in zip((*products.sources, products.given[2]), weights):  # the last takes as many as v has
        if weight.dim() != 2 or weight.shape[1] != sizes[source] or not _is_alike(weight, x):
            return None
        sizes.append(weight.shape[0])
    if any(one.shape != (sizes[len(products.sources)],) or not _is_alike(one, x) for one in bias):
        return None

    def operands(*batch: int) -> tuple[torch.Tensor, ...]:
        """What the products will be, for the checks, and the others: nothing reads it."""
        return _arranged((x.new_empty((*batch, sizes[number])) for number in products.given), others)

    checked = checked_operation(operands(*x.shape[:2]), form, plan, options)
    if checked is None:
        return None
    operation, pack = checked
    taken = (*operands(x.shape[:2].numel()), *pack.tables, pack.cu_seqlens)
    between = calls.call_of(operation, taken, taken)
    return None if between is None else LayerCall(products, between, tensors)


def _is_alike(tensor: torch.Tensor, x: torch.Tensor) -> bool:
    return tensor.dtype == x.dtype and tensor.device == x.device


class _Layer(torch.autograd.Function):
    """A layer as one node of autograd."""

    @staticmethod
    def forward(ctx, call: LayerCall, tables: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> torch.Tensor:
        o, kept = call.forward(tensors[0], (*tensors[1:], *tables), keep=True)
        ctx.set_materialize_grads(False)
        ctx.call = call
        needed = ctx.needs_input_grad[2:]
        ctx.save_for_backward(*(call.wanted(needed, kept) if False in needed[1:] else kept))
        return o

    @staticmethod
    @untraced
    def backward(ctx, do: torch.Tensor | None):
        call, kept, needed = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[2:]
        if do is None:
            return None, None, *[None] * len(needed)
        if torch.is_grad_enabled():  # with create_graph
            return None, None, *refused_again(NAME, partial(call.gradients, needed), do, *kept)
        return None, None, *call.gradients(needed, do, *kept)


_apply = calls.node(NAME, _Layer)
