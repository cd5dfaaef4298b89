"""What autograd has built behind a result."""

from __future__ import annotations

import torch


def nodes(y: torch.Tensor) -> list[str]:
    """The names of all nodes behind a result."""
    found, waiting = {}, [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            waiting += [one for one, _ in node.next_functions]
    return list(found.values())
