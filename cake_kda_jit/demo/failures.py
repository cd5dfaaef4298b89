"""Failures that the demo reports as one message and an exit code, without a traceback."""

from __future__ import annotations

import importlib
from types import ModuleType


class DemoFailure(Exception):
    """The demo cannot run or finish; ``exit_code`` is 1 for a failure, 2 for wrong use."""

    exit_code = 1


class WrongUse(DemoFailure):
    """What the user asked for cannot be done; the message says what to ask instead."""

    exit_code = 2


def import_optional(name: str) -> ModuleType:
    """Import a module of the extra ``demo``; raises DemoFailure saying how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise DemoFailure(f"{package} is not installed; the demo needs it: pip install 'cake_kda_jit[demo]'") from None
