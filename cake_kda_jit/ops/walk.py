"""The transfer walk on checked inputs."""

from __future__ import annotations

import torch

from ..runtime.device import arch_of_device
from ..runtime.launch import launch
from .pipeline import address
from .select import select_walk


def walk(
    M: torch.Tensor,
    B: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor,
    *,
    variant: str | None,
    precision_mode: int,
    transpose: bool,
    family: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the walk; returns entry ``[F, HV, K, V]`` and exit ``[N, HV, K, V]``, fp32. ``family`` forces one."""
    num_chains = offsets.shape[0] - 1
    chosen = select_walk(
        arch_of_device(M.device).name,
        variant,
        precision_mode,
        family,
        num_walks=num_chains * B.shape[1],
        head_dim=B.shape[2],
    )
    entry = torch.empty_like(B)
    exit_ = B.new_empty((num_chains, *B.shape[1:]))
    if num_chains == 0:
        return entry, exit_
    values = {
        "M": M.data_ptr(),
        "B": B.data_ptr(),
        "initial": address(initial),
        "offsets": offsets.data_ptr(),
        "entry": entry.data_ptr(),
        "exit": exit_.data_ptr(),
        "num_chains": num_chains,
        "num_value_heads": B.shape[1],
        "first_head": 0,
        "num_block_heads": B.shape[1],
        "head_dim": B.shape[2],
        "transpose": int(transpose),
    }
    if B.shape[0] == 0:
        exit_.zero_() if initial is None else exit_.copy_(initial)
        return entry, exit_
    launch(chosen.record, chosen.reason, values, B.device)
    return entry, exit_
