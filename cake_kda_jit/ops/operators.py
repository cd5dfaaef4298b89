"""How an operation becomes torch operators: definition, implementations, fake, and its place in autograd."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps

import torch

from ..errors import UnsupportedProblemError
from ..runtime.launch import operation

NAMESPACE = "cake_kda_jit"
NO_SECOND_DERIVATIVE = "a second derivative is not supported: call without create_graph"

_library = torch.library.Library(NAMESPACE, "DEF")
_kernels: dict[str, Callable] = {}
_DEVICE_KEYS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def _any_requires_grad(*arguments: object) -> bool:
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in arguments)


# Torch 2.6 has none of its own.
any_requires_grad: Callable[..., bool] = getattr(torch._C, "_any_requires_grad", _any_requires_grad)


def untraced(function: Callable) -> Callable:
    """Decorate what torch.compile must not look into.

    Unlike torch.compiler.disable it does not import the compiler, which takes a second: one that nobody has imported
    looks into nothing.
    """
    hidden = torch._disable_dynamo(function)  # imports it when first called

    @wraps(function)
    def call(*args, **kwargs):
        return (hidden if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    call._torchdynamo_disable = True  # nor does a compiler step into this
    return call


def define(schema: str, implementation: Callable, fake: Callable) -> None:
    """Define an operator for CPU and CUDA tensors.

    ``implementation`` gets every argument by position, ``fake`` too, to answer with tensors of the right shapes and
    dtypes. What one call launches is one operation of ``last_launches``. A size that may change from call to call is a
    SymInt in the schema: a compiled graph would take an int for a constant.
    """
    name = schema.split("(")[0]
    _library.define(schema)

    def run(*arguments):
        with operation():
            return implementation(*arguments)

    _kernels[name] = run
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def differentiate(name: str, setup: Callable, backward: Callable) -> None:
    """Give an operator its gradient: ``setup(ctx, inputs, output)`` after a forward, ``backward(ctx, *gradients)``.

    What ``torch.library.register_autograd`` does, for operators whose arguments have no defaults and no keywords, the
    tensors first. Its own version walks the schema in every forward, which takes longer than all else that a call does
    on the host.
    """
    overload, kernel = getattr(getattr(torch.ops, NAMESPACE), name).default, _kernels[name]
    num_tensors = sum("Tensor" in str(argument.type) for argument in overload._schema.arguments)
    returns_list = "List" in str(overload._schema.returns[0].type)

    def below_autograd(keyset, arguments):
        with torch._C._AutoDispatchBelowAutograd():
            # Where nothing but the device is left to decide, its kernel is called at once; modes and tracing dispatch.
            left = (keyset & torch._C._after_ADInplaceOrView_keyset).highestPriorityTypeId()
            return kernel(*arguments) if left in _DEVICE_KEYS else overload(*arguments)

    def forward(ctx, keyset, rest, *tensors):
        arguments = (*tensors, *rest)
        output = below_autograd(keyset, arguments)
        setup(ctx, arguments, output)
        return tuple(output) if returns_list else output

    @untraced
    def tensor_gradients(ctx, *gradients):
        return None, None, *backward(ctx, *gradients)[:num_tensors]

    function = type(
        f"{name}_autograd",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(tensor_gradients)},
    )

    @untraced
    def run(keyset, *arguments):
        if torch.is_grad_enabled() and any_requires_grad(*arguments):
            output = function.apply(keyset, arguments[num_tensors:], *arguments[:num_tensors])
            return list(output) if returns_list else output
        return below_autograd(keyset, arguments)

    _library.impl(name, run, "Autograd", with_keyset=True)


def whole(tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Return saved tensors as the programs take those that were contiguous: hooks may give them back with strides."""
    return tuple(None if one is None else one.contiguous() for one in tensors)


def values_of(one: object) -> tuple:
    """Return the values of a dataclass's fields, as an operator takes them.

    ``astuple`` would copy each, and a graph compiled with a copy holds for that very object, not for an equal one.
    """
    return tuple(getattr(one, field.name) for field in fields(one))


def present(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or an empty one on ``like``'s device in its place: an operator has all outputs of its schema."""
    return like.new_empty(0, dtype=torch.float32) if tensor is None else tensor


def refuse_gradient(name: str, advice: str = NO_SECOND_DERIVATIVE) -> None:
    """Make an operator's outputs raise in a backward, where torch would warn and give nothing."""

    def setup(ctx, inputs, output):
        pass

    def refuse(ctx, *gradients):
        raise UnsupportedProblemError(f"{name} has no gradient; {advice}")

    differentiate(name, setup, refuse)


class _Refused(torch.autograd.Function):
    """Gradients, where somebody may ask for theirs: then it raises."""

    @staticmethod
    def forward(ctx, name: str, function: Callable, *tensors: torch.Tensor | None):
        ctx.name = name
        return tuple(function(*tensors))

    @staticmethod
    def backward(ctx, *directions: torch.Tensor | None):
        raise UnsupportedProblemError(f"{ctx.name}_backward has no gradient; {NO_SECOND_DERIVATIVE}")


def refused_again(name: str, function: Callable, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return ``function(*tensors)``, gradients of the operation ``name``, which raise where theirs are wanted."""
    return _Refused.apply(name, function, *tensors)
