"""Other libraries' KDA forward as arms beside ours: optional, refused by name where they are not installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata

import torch

from .. import config
from ..errors import UnsupportedProblemError
from ..reference.gate import gate, l2norm
from .core import Arm

Run = Callable[[], torch.Tensor]

PACKAGES = {"fla": ("fla-core", "0.6.0"), "cudnn": ("nvidia-cudnn-frontend", "1.32.0")}
"""The distribution behind each peer, and the version that its adapter was written for."""


def load(peer: str, module: str):
    """Import a peer's module and return it with the installed version; refuse a peer that is not there."""
    package, known = PACKAGES[peer]
    try:
        return import_module(module), metadata.version(package)
    except (ImportError, metadata.PackageNotFoundError) as error:
        raise UnsupportedProblemError(
            f"--peers {peer}: it cannot be imported ({error}); install {package}=={known} or leave the peer out"
        ) from error


def kernels_of(run: Callable[[], object], count: int = 3) -> str:
    """Return which kernels a run really launches on the device: the ``count`` longest, with their share of the time."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        run()
        torch.cuda.synchronize()
    spans = {event.key: event.self_device_time_total for event in profile.key_averages()}
    total = sum(spans.values()) or 1.0
    longest = sorted(spans, key=spans.__getitem__, reverse=True)[:count]
    return f"{len(spans)} kernels: " + ", ".join(f"{name[:60]} {spans[name] / total:.0%}" for name in longest)


def make_arms(
    peers: Sequence[str], tensors: Sequence[torch.Tensor], keywords: Mapping[str, object], boundaries: Sequence[int]
) -> dict[str, tuple[str, Run]]:
    """Return (library and version, run) by arm for the peers that are asked for; a run returns o ``[T, HV, V]``.

    ``tensors`` and ``keywords`` are those of ``chunk_kda``; every peer gets the same tensors, but for the arms called
    prepared, whose normalised q and k and ready gates are made beforehand and cost them nothing.
    """
    arms: dict[str, tuple[str, Run]] = {}
    for peer in peers:
        arms |= {"fla": _fla_arms, "cudnn": _cudnn_arms}[peer](tensors, keywords, boundaries)
    return arms


def describe(arms: Mapping[str, tuple[str, Run]]) -> list[Arm]:
    """Run each arm once and return it with the engine that ran."""
    described = []
    for name, (library, run) in arms.items():
        run()  # compiles, and tunes where the peer does
        described.append(Arm(name, f"{library}; {kernels_of(run)}", run))
    return described


def _fla_arms(tensors, keywords, boundaries) -> dict[str, tuple[str, Run]]:
    config.set_default("FLA_DISABLE_BACKEND_DISPATCH", "1")  # otherwise it calls other libraries that it finds
    module, version = load("fla", "fla.ops.kda")
    cu_seqlens = torch.tensor(boundaries, device=tensors[0].device)
    given = {name: value for name, value in keywords.items() if name != "plan"}
    given |= {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens.cpu(), "safe_gate": "lower_bound" in keywords}

    def run() -> torch.Tensor:
        with torch.no_grad():
            return module.chunk_kda(*tensors, **given)[0][0]

    return {"fla": (f"fla {version}", run)}


def _cudnn_arms(tensors, keywords, boundaries) -> dict[str, tuple[str, Run]]:
    module, version = load("cudnn", "cudnn.linear_attention.ops")
    q, k, v, g, beta = (tensor[0] for tensor in tensors)
    cu_seqlens = torch.tensor(boundaries, device=q.device, dtype=torch.int32)
    bound, head_dim = keywords.get("lower_bound"), q.shape[-1]
    fused: dict[str, object] = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    if bound is not None:
        bias = keywords["dt_bias"].view(-1, head_dim)
        fused |= {"safe_gate": True, "gate_lower_bound": bound, "a_log": keywords["A_log"], "dt_bias": bias}
        ready = gate(g.float(), keywords["A_log"], bias, bound)
    else:
        ready = g.float()
    prepared = (l2norm(q.float()).to(q), l2norm(k.float()).to(k), v, ready, torch.sigmoid(beta.float()))

    def runner(inputs, options) -> Run:
        def run() -> torch.Tensor:
            with torch.no_grad():
                return module.kimi_delta_attention(*inputs, cu_seqlens, **options)[0]

        return run

    library = f"cudnn-frontend {version}"
    return {
        "cudnn fused": (library, runner((q, k, v, g, beta), fused)),
        "cudnn prepared": (library, runner(prepared, {})),
    }
