"""What decides a call, and how what is known of it is found again: by its key, and sooner by a check in C++.

A key holds all that decides what is launched but the tensors' addresses: their layouts, dtypes, devices and kinds, the
plan's sizes, every option, and the environment. To make the key of a layer's tensors takes the host longer than a
launch. So what was found by a key is found again by a label, which is short, and one check of all tensors in C++,
which sees no less of a tensor than a key does. Where that says no, the key decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence

import torch

from .. import config
from .plan import Plan

MOST_CALLS = 512
"""Calls that are kept, and as many recordings of operators; each is some kilobytes."""

MOST_NEAR = 4
"""Checks behind one label, such as with and without gradients, under autocast, in inference mode."""

KNOBS = ("FAMILY", "BACKWARD", "CHECKPOINT_TOKENS", "TRANSFER_WALK")
"""Those that decide what is launched."""

_knobs = config.raw_reader(*KNOBS)

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Exactly these classes: a subclass wants to see what is called."""


def num_threads(tensor: torch.Tensor) -> int | None:
    """Return what a key must hold of the threads, for a tensor: cpu kernels are told their number."""
    return torch.get_num_threads() if tensor.is_cpu else None


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
        return name, *layouts, sizes, num_threads(tensors[0]), *rest, *_knobs()
    except (AttributeError, RuntimeError):  # the latter of a tensor that has no strides
        return None


def can_remember(key: Hashable, given: Sequence) -> bool:
    """Whether a key says all of a call's tensors: it is there, holds no tensor, and they are plain."""
    return key is not None and not any(isinstance(part, torch.Tensor) for part in key) and are_plain(given)


def are_plain(tensors: Sequence) -> bool:
    """Whether tensors are of no subclass, and no negation is pending, which the dispatcher would carry out."""
    return all(one is None or (type(one) in PLAIN and not one.is_neg()) for one in tensors)


def remember(found: dict, key: Hashable, value: object) -> None:
    """Remember a value by its key, in place of the oldest if there are many."""
    if len(found) >= MOST_CALLS:
        found.pop(list(found)[0], None)  # of a list: another thread may change the dictionary
    found[key] = value


class Known(dict):
    """Values by their keys, and a shorter way to those that were found before."""

    def __init__(self) -> None:
        super().__init__()
        self._shortcuts = Shortcuts()

    def find(self, name: str, plan: Plan | None, tensors: Sequence, *rest: Hashable) -> object | None:
        """Return the value of the call of which ``key_of`` is given as much; None if there is none."""
        try:
            sizes = None if plan is None else plan.sizes
            label = (name, sizes, tensors[0].shape, num_threads(tensors[0]), *rest, *_knobs())
            value = self._shortcuts.find(label, tensors)
            if value is None:
                value = self.get(key_of(name, plan, tensors, *rest))
                if value is not None:
                    self._shortcuts.add(label, tensors, value)
            return value
        # Of what is no tensor, of a tensor that has no strides, and of what cannot be hashed: the checks name it.
        except (AttributeError, RuntimeError, TypeError):
            return None

    def keep(self, key: Hashable, value: object) -> None:
        """Keep a value, in place of the oldest if there are many."""
        if len(self) >= MOST_CALLS:
            self._shortcuts = Shortcuts()  # one of which may hold what goes now
        remember(self, key, value)

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._shortcuts = Shortcuts()


class Shortcuts:
    """Values by a label and by the layouts of tensors, found without a key of them.

    The check is the one by which torch.compile guards its graphs. It compares classes, dispatch keys (so the kind of
    device, layout, negation, whatever wraps a tensor, and what a thread adds to them), dtypes, numbers of devices,
    ``requires_grad``, sizes and strides. It says no where two of the tensors are one object, and keeps none alive.
    """

    def __init__(self) -> None:
        self._near: dict[Hashable, tuple[tuple[Callable, object], ...]] = {}

    def find(self, label: Hashable, tensors: Sequence[torch.Tensor | None]) -> object | None:
        """Return the value that was added with this label and tensors like these; raises as ``Tensor.stride`` does."""
        label, present = _without_absent(label, tensors)
        near = self._near.get(label)
        if near is not None:
            # A nested tensor has no strides. Asked for them, it raises here; in the check it would end the process.
            deque(map(_stride, present), 0)
            for check, value in near:
                if check(*present):
                    return value
        return None

    def add(self, label: Hashable, tensors: Sequence[torch.Tensor | None], value: object) -> None:
        """Add a value, in place of the oldest if there are many; not by tensors to which the check would say no."""
        label, present = _without_absent(label, tensors)
        if _guards is not None and are_plain(present) and len(set(map(id, present))) == len(present):
            check = _guards(*present, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            remember(self._near, label, ((check, value), *self._near.get(label, ())[: MOST_NEAR - 1]))


_stride = torch.Tensor.stride


def _without_absent(label: Hashable, tensors: Sequence) -> tuple[Hashable, Sequence]:
    """The tensors that there are, and a label that says which."""
    present = [one for one in tensors if one is not None]
    if len(present) == len(tensors):
        return (label, len(present)), tensors
    return (label, *[one is None for one in tensors]), present


def _tensor_guards() -> Callable | None:
    """Torch's class of checks; None if this torch has none, or one that does not tell apart what a key does."""
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None
    one = torch.empty((2, 3), dtype=torch.float32, device="cpu")
    others = (
        torch.empty((2, 4), dtype=torch.float32, device="cpu"),
        torch.empty((3, 2), dtype=torch.float32, device="cpu").t(),
        one.to(torch.float64),
        torch.empty((2, 3), dtype=torch.float32, device="meta"),
        one.as_subclass(torch.nn.Parameter),
        one._neg_view(),
        None,
    )
    check = TensorGuards(one, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    is_right = check(torch.empty_like(one)) and not any(map(check, others))
    return TensorGuards if is_right else None


_guards = _tensor_guards()
