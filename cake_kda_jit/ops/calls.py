"""Eager calls, prepared: the operation of a key is checked, laid out and recorded once, then only launched.

A key holds all that decides what is launched but the tensors' addresses: their layouts, dtypes, devices and kinds, the
plan's sizes, every option, and the environment. So whoever finds a call under its key needs none of the checks that
stood between the arguments and the call when it was made.

This path is for plain tensors with nothing between them and the kernels. Under tracing, modes and transforms the
operators of ``library`` are called instead, which everybody else in PyTorch can see. They run recordings of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .. import config
from ..errors import UnsupportedProblemError
from . import checks
from .operations import Attention, BetweenProjections, Convolution, GatedNorm, Operation
from .operators import untraced
from .plan import Plan
from .recorder import AT_ONCE, Executor, Layout, Recorder, Recording, layout_of

MOST_CALLS = 512
"""Calls that are kept, and as many recordings of operators; each is some kilobytes."""

KNOBS = ("FAMILY", "BACKWARD", "CHECKPOINT_TOKENS", "TRANSFER_WALK")
"""Those that decide what is launched."""

BACKWARD_KNOBS = ("FAMILY", "TRANSFER_WALK")
"""Those that a backward still reads, whatever they were in the forward."""

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Exactly these classes: a subclass wants to see what is called."""


def is_eager() -> bool:
    """Whether nothing but autograd stands between a call and its kernels: no compiler, no mode, no transform."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or (torch._C._len_torch_function_stack() and _is_mode_of_functions())
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
    )


def _is_mode_of_functions() -> bool:
    """Whether a mode looks at calls: ``torch.set_default_device`` only names a device where a call names none."""
    return not all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def num_threads(tensor: torch.Tensor) -> int | None:
    """Return what a key must hold of the threads, for a tensor: cpu kernels are told their number."""
    return torch.get_num_threads() if tensor.is_cpu else None


class Call:
    """A differentiable operation on tensors of fixed layouts on one device; absent ones are None."""

    def __init__(self, operation: Operation, tensors: Sequence[torch.Tensor | None]) -> None:
        self.operation = operation
        self.device = tensors[0].device
        self.layouts = tuple(map(layout_of, tensors))
        self.strides = _strides_of(tensors)
        self.apply = _APPLY[operation.name]
        self.absent = (None,) * (len(self.layouts) - operation.num_differentiable)
        self._forwards: dict[bool, Recording] = {}
        self._backwards: dict[Hashable, Recording] = {}

    def __call__(self, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run the operation; returns its outputs, with their gradient where one is wanted."""
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
            return self.apply(self, *tensors)
        outputs, _ = self.forward(keep=False).run(tensors)
        return tuple(outputs)

    def forward(self, *, keep: bool) -> Recording:
        """Return the forward, recorded by now."""
        if keep not in self._forwards:
            recorder = Recorder(self.device, len(self.layouts))
            operands = tuple(map(recorder.tensor, range(len(self.layouts)), self.layouts))
            self._forwards[keep] = recorder.finish(*self.operation.forward(recorder, operands, keep=keep))
        return self._forwards[keep]

    def gradients(self, saved: tuple, directions: tuple) -> list[torch.Tensor | None]:
        """Run the backward; ``saved`` are the tensors and what the forward kept."""
        checks.check_gradients(f"{self.operation.name}_backward", *directions)
        # Hooks on saved tensors, such as those that keep them on the host, may give them back with other strides. What
        # is not as it was becomes contiguous, which a pass always takes.
        count = len(self.strides)
        tensors, kept = saved[:count], [one.contiguous() for one in saved[count:]]
        strides = _strides_of(tensors)
        if strides != self.strides:
            tensors = [one if was == now else one.contiguous() for one, was, now in zip(tensors, self.strides, strides)]
            strides = _strides_of(tensors)
        directions = self.operation.complete(tensors, directions)
        layouts = tuple(map(layout_of, directions))
        key = strides, layouts, config.raw(*BACKWARD_KNOBS)
        recording = self._backwards.get(key)
        if recording is None:
            recording = self._backwards[key] = self._record_backward(strides, layouts)
        outputs, _ = recording.run((*tensors, *kept, *directions))
        return outputs

    def _record_backward(self, strides: Sequence, directions: Sequence[Layout | None]) -> Recording:
        forward = self.forward(keep=True)
        first_kept = len(self.layouts)
        first_direction = first_kept + forward.num_kept
        recorder = Recorder(self.device, first_direction + len(directions))
        layouts = (one and one._replace(strides=found) for one, found in zip(self.layouts, strides))
        tensors = tuple(map(recorder.tensor, range(first_kept), layouts))
        kept = {
            name: recorder.tensor(first_kept + one.number, one.layout, one.offset) for name, one in forward.kept.items()
        }
        given = tuple(recorder.tensor(first_direction + number, layout) for number, layout in enumerate(directions))
        return recorder.finish(self.operation.backward(recorder, tensors, kept, given), {})


def _strides_of(tensors: Sequence[torch.Tensor | None]) -> tuple[tuple[int, ...] | None, ...]:
    return tuple([None if one is None else one.stride() for one in tensors])


class _Differentiable(torch.autograd.Function):
    """A call as one node of autograd."""

    @staticmethod
    def forward(ctx, call: Call, *tensors: torch.Tensor | None):
        outputs, kept = call.forward(keep=True).run(tensors)
        # Without this, autograd would fill the gradient of an output that nobody uses with zeros.
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*tensors, *kept)
        return tuple(outputs)

    @staticmethod
    @untraced
    def backward(ctx, *directions: torch.Tensor | None):
        call, saved = ctx.call, ctx.saved_tensors  # read once: under activation checkpointing a second time is an error
        if torch.is_grad_enabled():  # with create_graph
            return None, *_Refused.apply(call, len(saved), *saved, *directions), *call.absent
        return None, *call.gradients(saved, directions), *call.absent


class _Refused(torch.autograd.Function):
    """The backward of a call, where somebody may ask for a second derivative: then it raises."""

    @staticmethod
    def forward(ctx, call: Call, num_saved: int, *tensors: torch.Tensor | None):
        ctx.name = call.operation.name
        return tuple(call.gradients(tensors[:num_saved], tensors[num_saved:]))

    @staticmethod
    def backward(ctx, *directions: torch.Tensor | None):
        raise UnsupportedProblemError(
            f"{ctx.name}_backward has no gradient; a second derivative is not supported: call without create_graph"
        )


def node(name: str, function: type[torch.autograd.Function]) -> Callable:
    """Return the ``apply`` of a node of autograd called ``name``, which is what profilers and ``grad_fn`` show."""
    # What Function.apply does first is for transforms of torch.func, which never come here, and takes 3 us.
    return super(torch.autograd.Function, type(name, (function,), {})).apply


_APPLY = {one.name: node(one.name, _Differentiable) for one in (Attention, Convolution, GatedNorm, BetweenProjections)}

_calls: dict[Hashable, Call] = {}
_recordings: dict[Hashable, Recording] = {}


def key_of(name: str, plan: Plan | None, tensors: Sequence[torch.Tensor | None], *rest: Hashable) -> Hashable:
    """Return the key of a call; None if it cannot have one, because of something that the checks will name."""
    try:
        layouts = [
            None
            if one is None
            else (type(one), one.shape, one.stride(), one.dtype, one.device, one.layout, one.is_neg())
            for one in tensors
        ]
        sizes = None if plan is None else plan.sizes
        return name, *layouts, sizes, num_threads(tensors[0]), *rest, *config.raw(*KNOBS)
    except (AttributeError, RuntimeError):  # the latter of a tensor that has no strides
        return None


def find_call(key: Hashable) -> Call | None:
    """Return the call of a key; None if there is none."""
    try:
        return _calls.get(key)
    except TypeError:  # something that cannot be hashed is no argument of ours either: the checks name it
        return None


def make_call(
    key: Hashable, operation: Operation, given: Sequence, tensors: Sequence[torch.Tensor | None]
) -> Call | None:
    """Make and keep the call of a key, in place of the oldest one if there are many.

    ``given`` are the tensors of the key, ``tensors`` those of the operation, the same first. Returns None without a
    key, if one had to be copied for the operation, if one is no plain tensor or its negation is pending, which the
    dispatcher would carry out, if nothing would be launched, and for a number in a tensor, which may change under its
    key.
    """
    if not can_remember(key, given) or not operation.has_work(tensors):
        return None
    if any(one is not other for one, other in zip(given, operation.join(tensors))):
        return None
    call = Call(operation, tensors)
    remember(_calls, key, call)
    return call


def can_remember(key: Hashable, given: Sequence) -> bool:
    """Whether a key says all of a call's tensors: it is there, holds no tensor, and they are plain."""
    return key is not None and not any(isinstance(part, torch.Tensor) for part in key) and are_plain(given)


def are_plain(tensors: Sequence) -> bool:
    """Whether tensors are of no subclass, and no negation is pending, which the dispatcher would carry out."""
    return all(one is None or (type(one) in PLAIN and not one.is_neg()) for one in tensors)


def run_recorded(
    name: str, operation: Operation, tensors: tuple, function: Callable[[Executor, tuple], Sequence]
) -> Sequence[torch.Tensor | None]:
    """Return ``function(executor, tensors)``, recorded once for all tensors of these layouts.

    ``name`` and ``operation`` say which function it is. This is how operators run: each of the results is a tensor of
    its own.
    """
    if not operation.has_work(tensors):
        return function(AT_ONCE, tensors)
    key = key_of(name, None, tensors, operation)
    recording = _recordings.get(key)
    if recording is None:
        recorder = Recorder(tensors[0].device, len(tensors))
        operands = tuple(recorder.tensor(number, layout_of(one)) for number, one in enumerate(tensors))
        recording = recorder.finish(function(recorder, operands), {})
        remember(_recordings, key, recording)
    return recording.run(tensors)[0]


def remember(found: dict, key: Hashable, value: object) -> None:
    """Remember a value by its key, in place of the oldest if there are many."""
    if len(found) >= MOST_CALLS:
        found.pop(list(found)[0], None)  # of a list: another thread may change the dictionary
    found[key] = value
