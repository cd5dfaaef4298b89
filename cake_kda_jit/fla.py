"""``chunk_kda`` and ``causal_conv1d`` with the signatures of flash-linear-attention 0.6.0, for code written for it.

Every argument of theirs is converted or refused by name; one that neither has is a TypeError. What differs in a call is
how much it takes: K = V in {64, 128}, conv widths 2 to 4, 16-bit inputs on a GPU (fp32 too on a CPU).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import UnsupportedProblemError
from .ops import api
from .ops.parallel import ParallelContext
from .ops.plan import Plan, make_plan
from .ops.problem import KdaOptions

CHUNK_SIZES = (32, 64)
CONV_BACKENDS = ("triton", "mix", "cuda")


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: ParallelContext | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention; shapes, dtypes and errors as in ``cake_kda_jit.chunk_kda``, arguments as in theirs.

    ``disable_recompute`` chooses what the forward keeps: everything that the backward reads
    (``KdaOptions(backward="saved", keep_decayed_qk=True)``), or states every 512 tokens (``backward="replay"``); both
    give the same bits. ``use_graph`` takes the documents from ``cu_seqlens`` on the device, of ``max_num_seqs + 1``
    entries or fewer, so that a captured call may be replayed after their content has changed; rows of outputs and
    gradients behind the last document are then 0. ``chunk_size`` 32 and ``safe_gate`` change no result. ``A_log`` and
    ``dt_bias`` of any dtype are computed with in fp32. ``transpose_state_layout`` is their old name of
    ``state_v_first``. ``cp_context`` is a ``KcpContext`` of this package, with options of its own.

    Refused: ``return_intermediate_states``; ``use_graph`` beside ``cp_context``.
    """
    if return_intermediate_states:
        raise UnsupportedProblemError(
            "return_intermediate_states=True: states inside a document are not returned; cut the document where they "
            "are wanted and pass output_final_state=True"
        )
    if chunk_size not in CHUNK_SIZES:
        raise UnsupportedProblemError(f"chunk_size={chunk_size!r}; use one of {CHUNK_SIZES}, both with the same result")
    if transpose_state_layout is not None:
        if state_v_first:
            raise UnsupportedProblemError("transpose_state_layout is the old name of state_v_first; give one of them")
        state_v_first = transpose_state_layout
    if use_graph and cp_context is not None:
        raise UnsupportedProblemError(
            "use_graph=True beside cp_context, whose documents are fixed; leave one of them out"
        )
    plan = _graph_plan(q, v, cu_seqlens, use_graph, max_num_seqs)
    kept = KdaOptions("saved", keep_decayed_qk=True) if disable_recompute else KdaOptions("replay")
    options = None if cp_context is not None else kept  # a context has options of its own
    return api.chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        A_log=_in_fp32(A_log),
        dt_bias=_in_fp32(dt_bias),
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens if plan is None else None,
        cu_seqlens_cpu=cu_seqlens_cpu if plan is None else None,
        plan=plan,
        cp_context=cp_context,
        options=options,
    )


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: ParallelContext | None = None,
    *,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution; shapes, dtypes and errors as in ``cake_kda_jit.causal_conv1d``, but for two things.

    States are ``[N, D, W]``: the convolution never meets their first slot, but a final state has one more token in it,
    in x's dtype. ``residual`` ``[B, T, D]`` is added to y. ``backend`` names an implementation of theirs and changes
    nothing; ``chunk_indices`` is their table of ``cu_seqlens`` and not needed.

    Refused: no ``weight``; ``seq_idx``; ``output_final_state`` beside ``cp_context``.
    """
    if weight is None:
        raise UnsupportedProblemError("weight is None; give the taps [D, W]")
    if backend not in CONV_BACKENDS:
        raise UnsupportedProblemError(f"backend={backend!r}; use one of {CONV_BACKENDS}, all with the same result")
    if seq_idx is not None:
        raise UnsupportedProblemError("seq_idx is given; give the documents' boundaries as cu_seqlens")
    if chunk_indices is not None and cu_seqlens is None:
        raise UnsupportedProblemError("chunk_indices is given without cu_seqlens; give the documents' boundaries")
    if output_final_state and cp_context is not None:
        raise UnsupportedProblemError(
            "output_final_state=True beside cp_context: a final state's oldest token may be on another rank; call "
            "cake_kda_jit.causal_conv1d, whose states [N, D, W - 1] do without it"
        )
    if initial_state is not None and (initial_state.dim() != 3 or initial_state.shape[2] != weight.shape[-1]):
        raise UnsupportedProblemError(
            f"initial_state has shape {list(initial_state.shape)}; expected [N, D, W] with W = {weight.shape[-1]}"
        )
    y, final_state = api.causal_conv1d(
        x,
        weight,
        bias,
        activation=activation,
        initial_state=None if initial_state is None else initial_state[..., 1:],
        output_final_state=bool(output_final_state),
        cu_seqlens=cu_seqlens,
        plan=_host_plan(x, cu_seqlens, cu_seqlens_cpu),
        cp_context=cp_context,
    )
    if residual is not None:
        y = y + residual
    if not output_final_state:
        return y, None
    oldest = _oldest_slot(x, initial_state, cu_seqlens, weight.shape[-1])
    return y, torch.cat((oldest.unsqueeze(-1), final_state), dim=-1).to(x.dtype)


def _in_fp32(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.float()


def _graph_plan(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, use_graph: bool, max_num_seqs: int | None
) -> Plan | None:
    if not use_graph:
        if max_num_seqs is not None:
            raise UnsupportedProblemError("max_num_seqs belongs to use_graph=True; leave it out or set both")
        return None
    if cu_seqlens is None:  # a batch of equal lengths: its sizes are fixed as it is
        return None
    _, tokens, heads, head_dim = q.shape
    return make_plan(
        cu_seqlens,
        num_heads=heads,
        num_value_heads=v.shape[2],
        head_dim=head_dim,
        device=q.device,
        max_documents=cu_seqlens.shape[0] - 1 if max_num_seqs is None else max_num_seqs,
        max_tokens=tokens,
    )


def _host_plan(x: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> Plan | None:
    """Return a plan of the host's copy of the boundaries, which saves one from the device; None without it."""
    if cu_seqlens_cpu is None:
        return None
    if cu_seqlens is None:
        raise UnsupportedProblemError("cu_seqlens_cpu is given without cu_seqlens; it is only its copy: give both")
    return make_plan(cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, num_heads=1, head_dim=64, device=x.device)


def _oldest_slot(x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, width: int) -> Tensor:
    """Return the token W before each document's end, ``[N, D]``; of a shorter document, what its initial state has."""
    batch, tokens, channels = x.shape
    if cu_seqlens is None:
        lengths = torch.full((batch,), tokens, device=x.device)
        ends = lengths * torch.arange(1, batch + 1, device=x.device)
    else:
        boundaries = cu_seqlens.to(device=x.device, dtype=torch.int64)
        lengths, ends = boundaries.diff(), boundaries[1:]
    if initial_state is None:
        carried = x.new_zeros(len(lengths), channels)
    else:
        slots = lengths.clamp(max=width - 1).view(-1, 1, 1).expand(-1, channels, 1)
        carried = initial_state.gather(2, slots).squeeze(2)
    if batch * tokens == 0:
        return carried
    own = x.flatten(0, 1)[(ends - width).clamp(min=0)]
    return torch.where((lengths >= width).unsqueeze(1), own, carried)
