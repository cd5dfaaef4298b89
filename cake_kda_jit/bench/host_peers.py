"""A layer of flash-linear-attention's parts on the host: its Python, torch and Triton's launcher, on empty kernels.

FLA tunes its kernels when a shape is first met, which takes minutes and is no part of a call's time on the host. So
each kernel is given one configuration and a body that returns at once, before FLA is imported; what is launched, and
all that leads there, is FLA's own. With one configuration Triton's tuner looks nothing up, so FLA takes a little more
than this.
"""

from __future__ import annotations

import re
import sys

import torch
from torch import nn

from .. import config
from ..errors import UnsupportedProblemError
from ..ops.plan import Plan
from .host_timing import LAUNCHES, PRODUCTS, TORCH_PRODUCTS, Subject
from .peers import load

_HEAD = re.compile(r"def [^(]*\(.*?\)\s*:\n", re.DOTALL)


def make_fla(plan: Plan, x: torch.Tensor) -> Subject:
    """Return FLA's layer on x ``[1, T, hidden]`` with the plan's documents and heads; it launches by Triton's launcher.

    Raises UnsupportedProblemError without a CUDA device, where FLA is not installed or has been imported, and for a
    Triton of another kind.
    """
    if x.device.type != "cuda":
        raise UnsupportedProblemError(f"--peers fla: x is on {x.device}; FLA's kernels run on a CUDA device")
    launcher = _empty_kernels()
    config.set_default("FLA_DISABLE_BACKEND_DISPATCH", "1")  # otherwise it calls other libraries that it finds
    _, version = load("fla", "fla.modules")
    layer = FlaLayer(x.shape[2], plan.num_heads, plan.head_dim).to(x.device, x.dtype).requires_grad_(x.requires_grad)
    for parameter in (layer.A_log, layer.dt_bias):
        parameter.data = parameter.data.float()
    return Subject(
        "FLA's layer",
        lambda: layer(x, plan.cu_seqlens),
        [x, *layer.parameters()] if x.requires_grad else (),
        clocks={PRODUCTS: TORCH_PRODUCTS, LAUNCHES: ((launcher, "__call__"),)},
        engine=f"fla {version}, empty kernels",
    )


class FlaLayer(nn.Module):
    """FLA's convolutions, attention and gated norm between nine projections, called as in FLA's own layer.

    Its own needs ``transformers`` to be imported. H = HV heads of K = V channels, a decay and an output gate through a
    bottleneck of K.
    """

    def __init__(self, hidden: int, heads: int, head_dim: int) -> None:
        super().__init__()
        modules, self.attention = load("fla", "fla.modules")[0], load("fla", "fla.ops.kda")[0].chunk_kda
        inner, self.head_dim = heads * head_dim, head_dim
        for name in ("q", "k", "v"):
            self.add_module(f"{name}_proj", nn.Linear(hidden, inner, bias=False))
            self.add_module(f"{name}_conv", modules.ShortConvolution(inner, 4, activation="silu"))
        self.decay, self.gate = (
            nn.Sequential(nn.Linear(hidden, head_dim, bias=False), nn.Linear(head_dim, inner, bias=bias))
            for bias in (False, True)
        )
        self.beta = nn.Linear(hidden, heads, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.zeros(inner))
        self.norm = modules.FusedRMSNormGated(head_dim, activation="sigmoid", eps=1e-5)
        self.o_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Attend within each document of x ``[1, T, hidden]``."""
        q, k, v = (
            self._heads(getattr(self, f"{name}_conv")(getattr(self, f"{name}_proj")(x), cu_seqlens=cu_seqlens)[0])
            for name in ("q", "k", "v")
        )
        o, _ = self.attention(
            q=q,
            k=k,
            v=v,
            g=self._heads(self.decay(x)),
            beta=self.beta(x),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=True,
            cu_seqlens=cu_seqlens,
        )
        return self.o_proj(self.norm(o, self._heads(self.gate(x))).flatten(-2))

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(-1, (-1, self.head_dim))


def _empty_kernels() -> type:
    """Give every kernel that Triton meets from now on one configuration and a body that returns at once.

    Returns the class whose instances launch a kernel when they are called.
    """
    if "fla" in sys.modules:
        raise UnsupportedProblemError("--peers fla: fla has been imported; its kernels can only be emptied before")
    try:
        from triton.runtime import autotuner, driver, jit

        tuner, function = autotuner.Autotuner.__init__, jit.JITFunction.__init__
        jit.JITFunction._unsafe_update_src  # noqa: B018 -- whether this Triton has it
        launcher = driver.active.launcher_cls
    except (ImportError, AttributeError) as error:
        raise UnsupportedProblemError(f"--peers fla: kernels cannot be emptied with this Triton ({error})") from error

    def with_one(self, fn, arg_names, configs, *arguments, **keywords) -> None:
        tuner(self, fn, arg_names, configs[:1], *arguments, **keywords)

    def without_body(self, fn, *arguments, **keywords) -> None:
        function(self, fn, *arguments, **keywords)
        if "kernel" in fn.__name__:  # the others are called by kernels
            self._unsafe_update_src(_HEAD.match(self._src).group(0) + "    return\n")

    autotuner.Autotuner.__init__, jit.JITFunction.__init__ = with_one, without_body
    return launcher
