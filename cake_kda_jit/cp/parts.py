"""Parts of a pass: launches between two exchanges, recorded once per context and then only run.

A rank's part is a few launches that take a millisecond together, and the host would take a tenth of that to lay out
each anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..ops.keys import remember
from ..ops.recorder import Executor, Recorder, Recording, layout_of

if TYPE_CHECKING:
    from .context import KcpContext

Tensors = Mapping[str, "torch.Tensor | None"]


def run_part(
    ctx: KcpContext, key: Hashable, tensors: Tensors, function: Callable[[Executor, Tensors], Sequence]
) -> Sequence[torch.Tensor | None]:
    """Return ``function(executor, tensors)``, recorded when its key is first met; at least one tensor is given.

    The key decides all that the function does but for addresses: the layouts of the tensors, and which are None.
    """
    recording: Recording | None = ctx.parts.get(key)
    if recording is None:
        device = next(one.device for one in tensors.values() if one is not None)
        recorder = Recorder(device, len(tensors))
        operands = {name: recorder.tensor(number, layout_of(one)) for number, (name, one) in enumerate(tensors.items())}
        recording = recorder.finish(function(recorder, operands), {})
        remember(ctx.parts, key, recording)
    return recording.run(tuple(tensors.values()))[0]
