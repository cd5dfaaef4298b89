"""Eager calls, prepared: the operation of a key is checked, laid out and recorded once, then only launched.

All that decides what is launched but the tensors' addresses is in the key (``keys``). So whoever finds a call under its
key needs none of the checks that stood between the arguments and the call when it was made.

This path is for plain tensors with nothing between them and the kernels. Under tracing, modes and transforms the
operators of ``library`` are called instead, which everybody else in PyTorch can see. They run recordings of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .. import config
from ..errors import UnsupportedProblemError
from . import checks
from .keys import Known, Shortcuts, can_remember, key_of
from .operations import Attention, BetweenProjections, Convolution, GatedNorm, Operation
from .operators import any_requires_grad, refused_again, untraced
from .recorder import AT_ONCE, Executor, Layout, Recorder, Recording, layout_of

BACKWARD_KNOBS = ("FAMILY", "TRANSFER_WALK")
"""Those that a backward still reads, whatever they were in the forward."""

_backward_knobs = config.raw_reader(*BACKWARD_KNOBS)


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


class Call:
    """A differentiable operation on tensors of fixed layouts on one device; absent ones are None."""

    def __init__(self, operation: Operation, tensors: Sequence[torch.Tensor | None]) -> None:
        self.operation = operation
        self.device = tensors[0].device
        self.layouts = tuple(map(layout_of, tensors))
        self.strides = _strides_of(tensors)
        self.apply = _APPLY[operation.name]
        self.name = operation.name  # in errors, which of a part of another call is that call's
        self._forwards: dict[bool, Recording] = {}
        self._backwards: dict[Hashable, Recording] = {}
        self._shortcuts = Shortcuts()

    def __call__(self, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run the operation; returns its outputs, with their gradient where one is wanted."""
        if torch.is_grad_enabled() and any_requires_grad(*tensors):
            # Tables are no inputs of the node: each would take its time to look at, in both directions.
            count = self.operation.num_differentiable
            return self.apply(self, tensors[count:], *tensors[:count])
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
        given, knobs = (*saved, *directions), _backward_knobs()
        recording = self._shortcuts.find(knobs, given)
        if recording is None:
            checks.check_gradients(f"{self.name}_backward", *directions)
            taken = self._as_taken(saved, directions)
            recording = self._backward(taken, len(directions), knobs)
            if all(one is other for one, other in zip(given, taken)):
                self._shortcuts.add(knobs, given, recording)
            given = taken
        outputs, _ = recording.run(given)
        return outputs

    def _as_taken(self, saved: tuple, directions: tuple) -> tuple[torch.Tensor | None, ...]:
        """What a backward is given, as a pass takes it.

        Hooks on saved tensors, such as those that keep them on the host, may give them back with other strides. What is
        not as it was becomes contiguous, which a pass always takes. Raises UnsupportedProblemError where they give back
        something else than they took, whose memory a pass would read as what it is not.
        """
        count = len(self.strides)
        tensors, kept = saved[:count], [one.contiguous() for one in saved[count:]]
        for one, layout in zip((*tensors, *kept), (*self.layouts, *self.forward(keep=True).kept_layouts())):
            if one is not None and (one.shape, one.dtype, one.device) != (layout.shape, layout.dtype, self.device):
                self.refuse_saved(one, layout)
        strides = _strides_of(tensors)
        if strides != self.strides:
            tensors = [one if was == now else one.contiguous() for one, was, now in zip(tensors, self.strides, strides)]
        return (*tensors, *kept, *self.operation.complete(tensors, directions))

    def refuse_saved(self, given: torch.Tensor, was: Layout) -> None:
        """Raise UnsupportedProblemError for a tensor that came back from a hook as what it was not."""
        raise UnsupportedProblemError(
            f"{self.name}_backward is given {given.dtype} {list(given.shape)} on {given.device} for "
            f"{was.dtype} {list(was.shape)} on {self.device} that its forward saved; hooks on saved tensors must give "
            "back the shape, dtype and device that they took"
        )

    def _backward(self, taken: tuple, num_directions: int, knobs: tuple) -> Recording:
        """The backward of tensors, what was kept, and directions, recorded by now."""
        strides = _strides_of(taken[: len(self.strides)])
        layouts = tuple(map(layout_of, taken[len(taken) - num_directions :]))
        key = strides, layouts, knobs
        if key not in self._backwards:
            self._backwards[key] = self._record_backward(strides, layouts)
        return self._backwards[key]

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
    """A call as one node of autograd, with the gradients of its first tensors; the rest are its ``tables``."""

    @staticmethod
    def forward(ctx, call: Call, tables: tuple[torch.Tensor, ...], *tensors: torch.Tensor | None):
        given = (*tensors, *tables)
        outputs, kept = call.forward(keep=True).run(given)
        # Without this, autograd would fill the gradient of an output that nobody uses with zeros.
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*given, *kept)
        return tuple(outputs)

    @staticmethod
    @untraced
    def backward(ctx, *directions: torch.Tensor | None):
        call, saved = ctx.call, ctx.saved_tensors  # read once: under activation checkpointing a second time is an error
        if not torch.is_grad_enabled():
            return None, None, *call.gradients(saved, directions)

        def gradients(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
            return call.gradients(tensors[: len(saved)], tensors[len(saved) :])

        # With create_graph.
        return None, None, *refused_again(call.name, gradients, *saved, *directions)


def node(name: str, function: type[torch.autograd.Function]) -> Callable:
    """Return the ``apply`` of a node of autograd called ``name``, which is what profilers and ``grad_fn`` show."""
    # What Function.apply does first is for transforms of torch.func, which never come here, and takes 3 us.
    return super(torch.autograd.Function, type(name, (function,), {})).apply


_APPLY = {one.name: node(one.name, _Differentiable) for one in (Attention, Convolution, GatedNorm, BetweenProjections)}

_calls, _recordings = Known(), Known()

find_call = _calls.find


def make_call(asked: tuple | None, operation: Operation, tensors: Sequence[torch.Tensor | None]) -> Call | None:
    """Make and keep the call for which ``find_call`` was asked; ``tensors`` are the operation's, those asked for first.

    Returns None where ``keep_call`` does, if a tensor had to be copied for the operation, and if nothing would be
    launched.
    """
    return None if asked is None else keep_call(asked, partial(call_of, operation, tensors, asked[2]))


def call_of(
    operation: Operation, tensors: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor | None]
) -> Call | None:
    """Return a call; None if nothing would be launched, and if one of the ``given`` had to be copied for it.

    ``given`` are what the first of the operation's tensors were, before anybody may have copied them.
    """
    if not operation.has_work(tensors):
        return None
    is_copied = any(one is not other for one, other in zip(given, operation.join(tensors)))
    return None if is_copied else Call(operation, tensors)


def keep_call(asked: tuple, make: Callable[[], object | None]) -> object | None:
    """Return the call that ``make`` returns, kept from then on, in place of the oldest one if there are many.

    ``asked`` is what ``find_call`` was given: name, plan, tensors and all else. Returns None if ``make`` does, without
    a key, if a tensor is of a subclass or its negation is pending, which the dispatcher would carry out, and for a
    number in a tensor, which may change under its key.
    """
    key = key_of(*asked)
    call = make() if can_remember(key, asked[2]) else None
    if call is not None:
        _calls.keep(key, call)
        find_call(*asked)  # which makes its shortcut
    return call


def run_recorded(
    name: str, operation: Operation, tensors: tuple, function: Callable[[Executor, tuple], Sequence]
) -> Sequence[torch.Tensor | None]:
    """Return ``function(executor, tensors)``, recorded once for all tensors of these layouts.

    ``name`` and ``operation`` say which function it is. This is how operators run: each of the results is a tensor of
    its own.
    """
    if not operation.has_work(tensors):
        return function(AT_ONCE, tensors)
    recording = _recordings.find(name, None, tensors, operation)
    if recording is None:
        recorder = Recorder(tensors[0].device, len(tensors))
        operands = tuple(recorder.tensor(number, layout_of(one)) for number, one in enumerate(tensors))
        recording = recorder.finish(function(recorder, operands), {})
        _recordings.keep(key_of(name, None, tensors, operation), recording)
    return recording.run(tensors)[0]
