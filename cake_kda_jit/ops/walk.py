"""The transfer walk on checked inputs."""

from __future__ import annotations

import torch

from ..runtime.device import arch_of_device
from .pipeline import address
from .recorder import AT_ONCE, Executor
from .select import select_walk


def walk(
    M: torch.Tensor, B: torch.Tensor, initial: torch.Tensor | None, offsets: torch.Tensor, **form: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the walk; returns entry ``[F, HV, K, V]`` and exit ``[N, HV, K, V]``, fp32. ``form`` as ``walk_into``."""
    num_chains = offsets.shape[0] - 1
    entry = torch.empty_like(B)
    exit_ = B.new_empty((num_chains, *B.shape[1:]))
    if num_chains == 0:
        return entry, exit_
    if B.shape[0] == 0:
        exit_.zero_() if initial is None else exit_.copy_(initial)
        return entry, exit_
    walk_into(AT_ONCE, (M, B, initial, offsets), (entry, exit_), **form)
    return entry, exit_


def walk_into(
    executor: Executor,
    given: tuple,
    found: tuple,
    *,
    variant: str | None,
    precision_mode: int,
    transpose: bool,
    family: str | None,
) -> None:
    """Launch the walk of (M, B, initial, offsets) into (entry, exit), with a chain and a fragment at least.

    ``variant`` and ``precision_mode`` are as in ``select_walk``; ``family`` forces one.
    """
    M, B, initial, offsets = given
    entry, exit_ = found
    num_chains, num_value_heads, head_dim = offsets.shape[0] - 1, B.shape[1], B.shape[2]
    chosen = select_walk(
        arch_of_device(B.device).name,
        variant,
        precision_mode,
        family,
        num_walks=num_chains * num_value_heads,
        head_dim=head_dim,
    )
    values = {
        "M": M.data_ptr(),
        "B": B.data_ptr(),
        "initial": address(initial),
        "offsets": offsets.data_ptr(),
        "entry": entry.data_ptr(),
        "exit": exit_.data_ptr(),
        "num_chains": num_chains,
        "num_value_heads": num_value_heads,
        "first_head": 0,
        "num_block_heads": num_value_heads,
        "head_dim": head_dim,
        "transpose": int(transpose),
    }
    executor.launch(chosen.record, chosen.reason, values, B.device)
