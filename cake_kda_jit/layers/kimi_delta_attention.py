"""The attention layer of Kimi Linear, with the parameter names of its published checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedProblemError
from ..ops.api import chunk_kda
from ..ops.between import LayerForm, between_projections
from ..ops.layer import FULL_RANK, LOW_RANK, attention_layer
from ..ops.parallel import ParallelContext, short_convolutions
from ..ops.plan import Plan
from ..ops.problem import KdaOptions
from .checks import check_gate_parameters, check_kernel_dtype, check_modules
from .parts import GatedRMSNorm, ShortConvolution, bare_parameters, call, calls_are_plain, project

_CONVOLUTIONS = tuple((name, ShortConvolution) for name in ("q_conv1d", "k_conv1d", "v_conv1d"))
_NORM = (("o_norm", GatedRMSNorm),)
_PROJECTIONS = {  # in the order of ``Products``, by low_rank_gate
    True: ("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj"),
    False: ("q_proj", "k_proj", "v_proj", "f_proj", "b_proj", "g_proj", "o_proj"),
}
_ALL = {
    is_low_rank: (*_CONVOLUTIONS, *_NORM, *((name, nn.Linear) for name in names))
    for is_low_rank, names in _PROJECTIONS.items()
}


class KimiDeltaAttention(nn.Module):
    """Kimi Delta Attention as published, ``[B, T, hidden_size]`` to the same shape.

    q, k and v are projections of x, each through its own short convolution. The decay's logits, beta's logits and the
    output gate come from x directly. The kernels norm q and k and apply the gate and beta's sigmoid themselves.

    H is ``num_heads``, HV ``num_value_heads`` (a multiple of H, default H), K = V = ``head_dim`` (64 or 128). With
    ``lower_bound`` in [-5, 0) the decay is ``lower_bound * sigmoid(exp(A_log) (f(x) + dt_bias))``, without it
    ``-exp(A_log) softplus(f(x) + dt_bias)``. Decay and output gate come through a bottleneck of ``head_dim`` channels,
    or straight from x without ``low_rank_gate``; ``output_gate_bias`` adds a bias to the latter's logits.
    ``allow_neg_eigval`` doubles beta. ``kernel_dtype`` is the dtype of q, k and v on the kernels; None leaves what the
    projections give: the module's dtype, or autocast's.

    Parameters are named as in Kimi Linear checkpoints and load from them, see ``attention_weights``. ``A_log`` is
    ``[HV]`` here, and their ``[1, 1, HV, 1]`` is flattened on loading. ``A_log`` and ``dt_bias [HV * K]`` stay fp32
    whatever dtype the module is cast to, because bf16 would round a slow decay to none.

    Raises UnsupportedProblemError if HV is not a multiple of H, and in a forward if something has cast ``A_log`` or
    ``dt_bias`` all the same, if one of them or a module is not there, and for a ``kernel_dtype`` that kernels do not
    take; other limits are those of ``chunk_kda``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        num_value_heads: int | None = None,
        conv_size: int = 4,
        lower_bound: float | None = None,
        norm_eps: float = 1e-5,
        kernel_dtype: torch.dtype | None = None,
        low_rank_gate: bool = True,
        output_gate_bias: bool = False,
        allow_neg_eigval: bool = False,
    ) -> None:
        super().__init__()
        num_value_heads = num_heads if num_value_heads is None else num_value_heads
        if num_heads < 1 or num_value_heads < 1 or num_value_heads % num_heads:
            raise UnsupportedProblemError(
                f"num_heads={num_heads}, num_value_heads={num_value_heads}; num_value_heads must be a multiple of "
                "num_heads, both at least 1"
            )
        self.head_dim = head_dim
        self.lower_bound = lower_bound
        self.kernel_dtype = kernel_dtype
        self.low_rank_gate = bool(low_rank_gate)
        self.allow_neg_eigval = allow_neg_eigval
        key_size, value_size = num_heads * head_dim, num_value_heads * head_dim

        self.q_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.q_conv1d = ShortConvolution(key_size, conv_size)
        self.k_conv1d = ShortConvolution(key_size, conv_size)
        self.v_conv1d = ShortConvolution(value_size, conv_size)

        self._add_gate("f", hidden_size, value_size, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(value_size, dtype=torch.float32))
        self.b_proj = nn.Linear(hidden_size, num_value_heads, bias=False)

        self._add_gate("g", hidden_size, value_size, bias=output_gate_bias)
        self.o_norm = GatedRMSNorm(head_dim, norm_eps)
        self.o_proj = nn.Linear(value_size, hidden_size, bias=False)

        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_flatten_published_A_log)

    def _add_gate(self, name: str, hidden_size: int, value_size: int, bias: bool) -> None:
        """Make the projections of the decay (f) or of the output gate (g)."""
        if self.low_rank_gate:
            self.add_module(f"{name}_a_proj", nn.Linear(hidden_size, self.head_dim, bias=False))
            self.add_module(f"{name}_b_proj", nn.Linear(self.head_dim, value_size, bias=bias))
        else:
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, value_size, bias=bias))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start the gate as published: softplus(dt_bias) from 1e-3 to 0.1, amplitudes of 1 to 16, or 1 if bounded."""
        if self.lower_bound is None:
            self.A_log.uniform_(1, 16).log_()
        else:
            self.A_log.zero_()
        dt = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp_().clamp_(min=1e-4)
        # The inverse of softplus, log(exp(dt) - 1), in a form that keeps its digits for small dt.
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        plan: Plan | None = None,
        cp_context: ParallelContext | None = None,
        options: KdaOptions | None = None,
    ) -> Tensor:
        """Attend within each document of x ``[B, T, hidden_size]``; same shape, dtype of the projections.

        Packed documents (then B = 1) are given by ``cu_seqlens [N + 1]``, or by a ``plan`` of ``make_plan`` that all
        layers of a step share, or by a ``cp_context`` whose ranks hold the pack's fragments; without any, each batch
        row is a document. ``options`` as in ``chunk_kda``.
        """
        is_plain = calls_are_plain()
        if is_plain and cu_seqlens is None and cp_context is None:
            o = self._as_one_call(x, plan, options)
            if o is not None:
                return o
        A_log, dt_bias = self.A_log, self.dt_bias
        check_gate_parameters(A_log=A_log, dt_bias=dt_bias)
        linear, modules = project if is_plain else call, self._modules
        check_modules(modules, _ALL[self.low_rank_gate])
        rows = [linear(modules, name, x) for name in ("q_proj", "k_proj", "v_proj")]
        logits = self._gate_logits(linear, "f", x), linear(modules, "b_proj", x)
        check_kernel_dtype(self.kernel_dtype, rows[0], logits[0])
        if self.kernel_dtype is not None:
            rows = [one.to(self.kernel_dtype) for one in rows]
        given = (*rows, *logits, A_log, dt_bias, self._gate_logits(linear, "g", x))
        documents = {"cu_seqlens": cu_seqlens, "plan": plan, "cp_context": cp_context}
        y = self.between_projections(given, is_plain=is_plain, options=options, **documents)
        return linear(modules, "o_proj", y)

    def _as_one_call(self, x: Tensor, plan: Plan | None, options: KdaOptions | None) -> Tensor | None:
        """Return the output, None under autocast, where modules are not bare or ``attention_layer`` returns it."""
        if torch._C._is_any_autocast_enabled():
            return None
        if getattr(self.between_projections, "__func__", None) is not KimiDeltaAttention.between_projections:
            return None  # a subclass has its own
        if self.kernel_dtype is not None and self.kernel_dtype != x.dtype:
            return None
        found, parameters = bare_parameters(self._modules, _ALL[self.low_rank_gate]), self._parameters
        A_log, dt_bias = parameters.get("A_log"), parameters.get("dt_bias")
        if found is None or A_log is None or dt_bias is None or not A_log.dtype == dt_bias.dtype == torch.float32:
            return None
        (q_conv, k_conv, v_conv, norm, *weights), biases = found
        if biases and biases.keys() != {_PROJECTIONS[self.low_rank_gate][-2]}:  # the output gate's may have one
            return None
        tensors = (x, q_conv, k_conv, v_conv, A_log, dt_bias, norm, *weights, *biases.values())
        products = LOW_RANK if self.low_rank_gate else FULL_RANK
        return attention_layer(tensors, products, self._form(), plan=plan, options=options)

    def _form(self) -> LayerForm:
        return LayerForm(self.head_dim, self._modules["o_norm"].eps, self.lower_bound, self.allow_neg_eigval)

    def between_projections(
        self,
        given: tuple[Tensor, ...],
        *,
        is_plain: bool,
        cu_seqlens: Tensor | None = None,
        plan: Plan | None = None,
        cp_context: ParallelContext | None = None,
        options: KdaOptions | None = None,
    ) -> Tensor:
        """Return ``[B, T, HV * V]``, what the last projection takes, of what the others give.

        ``given`` are what becomes q, k and v, the logits of decay and beta, A_log, dt_bias, and the logits of the
        output gate. Documents as in ``forward``. If ``is_plain``, which is ``calls_are_plain()``, and none of the
        modules has hooks, it is one call and one node of autograd.
        """
        modules = self._modules
        if is_plain and cu_seqlens is None and cp_context is None:
            found = bare_parameters(modules, (*_CONVOLUTIONS, *_NORM))
            if found is not None:
                *weights, norm_weight = found[0]
                tensors = (*given[:3], *weights, *given[3:], norm_weight)
                y = between_projections(tensors, self._form(), plan=plan, options=options)
                if y is not None:
                    return y
        documents = {"cu_seqlens": cu_seqlens, "plan": plan, "cp_context": cp_context}
        q, k, v = self._convolve(given[:3], is_plain, documents)
        decay, beta, A_log, dt_bias, gate = given[3:]
        o, _ = chunk_kda(
            self._heads(q),
            self._heads(k),
            self._heads(v),
            self._heads(decay),
            beta,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            lower_bound=self.lower_bound,
            A_log=A_log,
            dt_bias=dt_bias,
            options=options,
            **documents,
        )
        return modules["o_norm"](o, gate)

    def _convolve(self, rows: tuple[Tensor, ...], is_plain: bool, documents: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return q, k and v convolved. If ``is_plain``, and without hooks, ranks exchange for all three at once."""
        if is_plain and documents["cp_context"] is not None:
            bare = bare_parameters(self._modules, _CONVOLUTIONS)
            if bare is not None:
                found = short_convolutions(rows, [weight.squeeze(1) for weight in bare[0]], **documents)
                if found is not None:
                    return found
        return tuple(self._modules[name](x, **documents) for (name, _), x in zip(_CONVOLUTIONS, rows))

    def _gate_logits(self, linear: Callable[[dict, str, Tensor], Tensor], name: str, x: Tensor) -> Tensor:
        """Return the logits of the decay (f) or of the output gate (g)."""
        modules = self._modules
        if self.low_rank_gate:
            return linear(modules, f"{name}_b_proj", linear(modules, f"{name}_a_proj", x))
        return linear(modules, f"{name}_proj", x)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move or cast all tensors, except that the gate's parameters and their gradients are only moved."""
        fp32_only = [t for p in (self.A_log, self.dt_bias) if p is not None for t in (p, p.grad) if t is not None]

        def apply(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if any(tensor is kept for kept in fp32_only) and moved.dtype != torch.float32:
                return tensor.detach().to(moved.device)
            return moved

        return super()._apply(apply, recurse)


def _flatten_published_A_log(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    key = prefix + "A_log"
    if key in state_dict and state_dict[key].dim() != 1:
        state_dict[key] = state_dict[key].flatten()
