"""Other libraries' KDA beside ours: arms that run, refused by name where not installed, and figures recorded once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata

import torch

from .. import config
from ..errors import UnsupportedProblemError
from ..paths import data_dir
from ..reference.gate import gate, l2norm
from .core import Arm, Row, Times

PACKAGES = {"fla": ("fla-core", "0.6.0"), "cudnn": ("nvidia-cudnn-frontend", "1.32.0")}
"""The distribution behind each peer, and the version that its adapter was written for."""
RECORDED = data_dir() / "docs" / "measurements" / "peers_recorded.json"
"""What peers took that take minutes to tune, or that have no adapter: a checkout has it, an installed package not."""
FORWARD, STEP = "forward", "forward and backward"


def names_of(parser: argparse.ArgumentParser, text: str, known: Collection[str] = tuple(PACKAGES)) -> list[str]:
    """Return the peers that ``--peers`` names, with commas between; ends the program for one that is not ``known``."""
    names = [name for name in text.split(",") if name]
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"--peers names {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def load(peer: str, module: str):
    """Import a peer's module and return it with the installed version; refuse a peer that is not there."""
    package, known = PACKAGES[peer]
    try:
        return import_module(module), metadata.version(package)
    except (ImportError, metadata.PackageNotFoundError) as error:
        raise UnsupportedProblemError(
            f"--peers {peer}: it cannot be imported ({error}); install {package}=={known} or leave the peer out"
        ) from error


def recorded_rows(what: str, case: str, running: Collection[str] = ()) -> list[Row]:
    """Return the recorded rows of a case, ``what`` being FORWARD or STEP, without the arms that run beside ours now."""
    if not RECORDED.is_file():
        return []
    report = json.loads(RECORDED.read_text(encoding="utf-8"))
    origin = f"recorded {report['date']} on {report['machine']['device']}"
    return [
        Row(
            case,
            f"{row['arm']} (recorded)",
            f"{row['engine']}; {origin}",
            Times(row["ms"]["median"], None, None, row["ms"]["runs"]),
            row["bytes"],
        )
        for row in report["rows"]
        if (row["pass"], row["case"]) == (what, case) and row["arm"] not in running
    ]


def kernels_of(run: Callable[[], object], count: int = 3) -> str:
    """Return which kernels a run really launches on the device: the ``count`` longest, with their share of the time."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        run()
        torch.cuda.synchronize()
    spans = {event.key: event.self_device_time_total for event in profile.key_averages()}
    spans = {name: span for name, span in spans.items() if span > 0}  # the profiler's own events take none
    total = sum(spans.values()) or 1.0
    longest = sorted(spans, key=spans.__getitem__, reverse=True)[:count]
    return f"{len(spans)} kernels: " + ", ".join(f"{name[:60]} {spans[name] / total:.0%}" for name in longest)


@dataclass(frozen=True)
class Call:
    """KDA by some library: ``run(*inputs)`` returns o ``[T, HV, V]``, differentiable in inputs and parameters.

    ``inputs`` are q, k, v, g, beta, all with a batch of 1 or all without; ``keywords`` are what the reference needs to
    compute the same of them.
    """

    library: str
    inputs: tuple[torch.Tensor, ...]
    run: Callable[..., torch.Tensor]
    keywords: Mapping[str, object]
    parameters: tuple[torch.Tensor, ...] = ()


def make_calls(
    peers: Sequence[str], tensors: Sequence[torch.Tensor], keywords: Mapping[str, object], boundaries: Sequence[int]
) -> dict[str, Call]:
    """Return the calls by arm for the peers that are asked for.

    ``tensors`` and ``keywords`` are those of ``chunk_kda``; every peer gets the same tensors, but for the arms called
    prepared, whose normalised q and k and ready gates are made beforehand and cost them nothing.
    """
    calls: dict[str, Call] = {}
    for peer in peers:
        calls |= {"fla": _fla_calls, "cudnn": _cudnn_calls}[peer](tensors, keywords, boundaries)
    return calls


def describe(calls: Mapping[str, Call]) -> list[Arm]:
    """Run each call's forward once and return it as an arm with the engine that ran."""
    described = []
    for name, call in calls.items():

        def run(call: Call = call) -> torch.Tensor:
            with torch.no_grad():
                return call.run(*call.inputs)

        run()  # compiles, and tunes where the peer does
        described.append(Arm(name, f"{call.library}; {kernels_of(run)}", run))
    return described


def _fla_calls(tensors, keywords, boundaries) -> dict[str, Call]:
    config.set_default("FLA_DISABLE_BACKEND_DISPATCH", "1")  # otherwise it calls other libraries that it finds
    module, version = load("fla", "fla.ops.kda")
    cu_seqlens = torch.tensor(boundaries, device=tensors[0].device)
    given = {name: value for name, value in keywords.items() if name != "plan"}
    parameters = {name: given[name].detach() for name in ("A_log", "dt_bias") if name in given}
    given |= {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens.cpu(), "safe_gate": "lower_bound" in keywords}
    given |= parameters

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        return module.chunk_kda(*inputs, **given)[0].flatten(0, 1)  # a view in the backward too

    inputs = tuple(tensor.detach() for tensor in tensors)
    return {"fla": Call(f"fla {version}", inputs, run, keywords, tuple(parameters.values()))}


def _cudnn_calls(tensors, keywords, boundaries) -> dict[str, Call]:
    module, version = load("cudnn", "cudnn.linear_attention.ops")
    q, k, v, g, beta = raw = tuple(tensor.detach()[0] for tensor in tensors)
    cu_seqlens = torch.tensor(boundaries, device=q.device, dtype=torch.int32)
    bound, head_dim = keywords.get("lower_bound"), q.shape[-1]
    fused: dict[str, object] = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    parameters: tuple[torch.Tensor, ...] = ()
    ready = g.float()
    if bound is not None:
        A_log, bias = parameters = keywords["A_log"].detach(), keywords["dt_bias"].detach().view(-1, head_dim)
        fused |= {"safe_gate": True, "gate_lower_bound": bound, "a_log": A_log, "dt_bias": bias}
        ready = gate(ready, A_log, bias, bound)
    prepared = (l2norm(q.float()).to(q), l2norm(k.float()).to(k), v.clone(), ready, torch.sigmoid(beta.float()))

    def runner(options) -> Callable[..., torch.Tensor]:
        return lambda *inputs: module.kimi_delta_attention(*inputs, cu_seqlens, **options)[0]

    library = f"cudnn-frontend {version}"
    return {
        "cudnn fused": Call(library, raw, runner(fused), keywords, parameters),
        "cudnn prepared": Call(library, prepared, runner({}), {}),
    }
