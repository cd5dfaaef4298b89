"""The public operations: check the inputs, make or take a plan, call the operators."""

from __future__ import annotations

import torch

from ..errors import PlanMismatchError, UnsupportedProblemError
from . import checks
from .calls import find_call, is_eager, make_call
from .inputs import beta_form_of, gate_form_of, transforms_of
from .library import OPERATORS, attend, convolve
from .operations import Attention, Convolution
from .operators import values_of
from .pack import check_boundaries
from .parallel import ParallelContext, attend_parallel, check_context, find_checked, remember_checked
from .plan import Plan, PlanHeads, plan_of_boundaries
from .problem import KdaOptions, resolve_options
from .select import SegmentRule


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    plan: Plan | None = None,
    cp_context: ParallelContext | None = None,
    options: KdaOptions | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi Delta Attention over a batch, or over documents packed into one sequence.

    Per token: ``S <- diag(exp(g)) S``, then ``S <- S + k (beta (v - S^T k))^T``, then ``o = scale S^T q``.

    Shapes: q, k ``[B, T, H, K]``; v ``[B, T, HV, V]``; g ``[B, T, HV, K]``; beta ``[B, T, HV]``; K = V in {64, 128}, HV
    a multiple of H. With ``cu_seqlens`` (int32 or int64 ``[N + 1]``, from 0 to T) or a ``plan``, B is 1 and N documents
    never mix; otherwise N = B. States are fp32 ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with ``state_v_first``. With a
    ``cp_context`` the tokens are this rank's, and N counts the documents of all ranks: see ``KcpContext``.

    dtypes: q, k, v share bf16 or fp16 (fp32 too on a CPU); g and beta have that dtype or fp32; ``A_log`` ``[HV]`` and
    ``dt_bias`` ``[HV * K]`` or ``[HV, K]`` are fp32. Gradients have their input's dtype and are summed in fp32.

    Transforms: ``use_qk_l2norm_in_kernel`` divides q and k by their norm; ``use_gate_in_kernel`` takes g raw and forms
    ``-exp(A_log) softplus(g + dt_bias)``, or ``lower_bound sigmoid(exp(A_log) (g + dt_bias))`` where ``lower_bound`` in
    [-5, 0) is given; otherwise g is the natural log of the decay, at most 0, ``-inf`` being a reset.
    ``use_beta_sigmoid_in_kernel`` takes beta raw, doubled after the sigmoid with ``allow_neg_eigval``. ``safe_gate`` is
    accepted for compatibility and changes no result.

    Returns o ``[B, T, HV, V]`` in q's dtype and the final states (None unless ``output_final_state``). An empty
    document's final state is its initial state.

    Errors: UnsupportedProblemError before any launch, PlanMismatchError for a plan or a context of another pack,
    BuildError and LoadError for a kernel that cannot be had, CommunicationError where ranks fail to meet.
    """
    if plan is not None and cp_context is None and (cu_seqlens is not None or cu_seqlens_cpu is not None):
        checks.check_plan_boundaries(plan, cu_seqlens, cu_seqlens_cpu)
        cu_seqlens = cu_seqlens_cpu = None  # the plan has them
    given = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    asked = None
    if cu_seqlens is None and cu_seqlens_cpu is None and not state_v_first and is_eager():
        flags = (use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)
        asked = ("chunk_kda", plan, given, *flags, output_final_state, scale, lower_bound, options)
        if cp_context is not None:
            checked = find_checked(cp_context, asked)
            if checked is not None:
                return attend_parallel(cp_context, given, checked, output_final_state)
        elif (call := find_call(*asked)) is not None:
            return call(*given, *(checks.plan_for(q, v, None, None, None) if plan is None else plan).tables)
    checks.check_attention_shapes(q, k, v, g, beta)
    checks.check_tensors(A_log=A_log, dt_bias=dt_bias, initial_state=initial_state)
    checks.check_no_transform("chunk_kda", *given)
    checks.check_gate(use_gate_in_kernel, lower_bound, A_log, dt_bias, v)
    _check_beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    parallel = check_context(
        cp_context, q, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, plan=plan, options=options
    )
    resolved = resolve_options(options)
    if parallel is None:
        pack = checks.plan_for(q, v, cu_seqlens, cu_seqlens_cpu, plan)
    else:
        parallel.check_tokens("q", q)
        pack = parallel
    value_heads, head_dim = v.shape[2:]
    checks.check_state(
        "initial_state",
        initial_state,
        (pack.num_documents, value_heads, head_dim, head_dim),
        "[N, HV, V, K]" if state_v_first else "[N, HV, K, V]",
        q,
    )
    if initial_state is not None:
        initial_state = (initial_state.transpose(-1, -2) if state_v_first else initial_state).contiguous()
    tensors = (q, k, v, g, beta, *_gate_parameters(A_log, dt_bias), initial_state)
    transforms = transforms_of(
        head_dim, scale, lower_bound, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )  # fmt: skip
    if parallel is not None:
        remember_checked(parallel, asked, tensors, values_of(transforms))
        o, final_state = attend_parallel(parallel, tensors, values_of(transforms), output_final_state)
    else:
        operation = Attention(pack.num_summaries, pack.has_spare_rows, transforms, resolved, output_final_state)
        tensors = (*tensors, *pack.tables)
        call = make_call(asked, operation, tensors)
        o, final_state = attend(operation, tensors) if call is None else call(*tensors)
    if not output_final_state:
        return o, None
    return o, final_state.transpose(-1, -2) if state_v_first else final_state


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    plan: Plan | None = None,
    cp_context: ParallelContext | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal depthwise convolution of width 2 to 4, with SiLU; documents never mix.

    ``y[t] = silu(bias + sum_w weight[:, w] x[t - W + 1 + w])``, summed in fp32.

    Shapes: x ``[B, T, D]``, weight ``[D, W]``, bias ``[D]``, states ``[N, D, W - 1]``: the tokens before a document,
    nearest last. With ``cu_seqlens``, a ``plan`` or a ``cp_context`` B is 1. dtypes: x bf16 or fp16 (fp32 too on a
    CPU); weight and bias x's or fp32; initial_state x's or fp32, and final_state like it (x's without one).

    ``activation`` is "silu" (or "swish") or None. Returns y ``[B, T, D]`` and the final states (None unless
    ``output_final_state``). Errors as in ``chunk_kda``.
    """
    if plan is not None and cp_context is None and cu_seqlens is not None:
        checks.check_plan_boundaries(plan, cu_seqlens)
        cu_seqlens = None  # the plan has them
    given = (x, weight, bias, initial_state)
    asked = None
    if cp_context is None and cu_seqlens is None and is_eager():
        asked = ("causal_conv1d", plan, given, activation, output_final_state)
        call = find_call(*asked)
        if call is not None:
            return call(*given, _batch_boundaries(x) if plan is None else plan.cu_seqlens)
    if activation not in ("silu", "swish", None):
        raise UnsupportedProblemError(f"activation={activation!r}; use 'silu' or None")
    checks.check_convolution(x, weight, bias)
    checks.check_tensors(initial_state=initial_state)
    checks.check_no_transform("causal_conv1d", x, weight, bias, initial_state)
    parallel = check_context(cp_context, x, cu_seqlens=cu_seqlens, plan=plan)
    if parallel is None:
        boundaries_table, num_documents = _conv_boundaries(x, cu_seqlens, plan)
    else:
        parallel.check_tokens("x", x)
        num_documents = parallel.num_documents
    initial_state = _check_conv_state(initial_state, x, (num_documents, x.shape[2], weight.shape[1] - 1))
    tensors = (x, weight.contiguous(), None if bias is None else bias.contiguous(), initial_state)
    if parallel is not None:
        y, final_state = parallel.convolution(
            tensors, use_silu=activation is not None, output_final_state=output_final_state
        )
    else:
        has_spare_rows = plan is not None and plan.has_spare_rows
        operation = Convolution(has_spare_rows, activation is not None, output_final_state)
        tensors = (*tensors, boundaries_table)
        call = make_call(asked, operation, tensors)
        y, final_state = convolve(operation, tensors) if call is None else call(*tensors)
    return y, final_state if output_final_state else None


def segment_summary(
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    offsets: torch.Tensor,
    *,
    need_M: bool = True,
    need_B: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Summarize fragments of tokens as affine maps of the state, ``S_out = M S_in + B``.

    Shapes and dtypes as in ``chunk_kda`` with B = 1; ``offsets`` int32 or int64 ``[F + 1]`` are the fragments' token
    boundaries, from 0 to T. Returns M ``[F, HV, K, K]`` and B ``[F, HV, K, V]`` in fp32, None for one not needed; an
    empty fragment has M = I, B = 0. Not differentiable. Errors as in ``chunk_kda``.
    """
    checks.check_attention_shapes(k, k, v, g, beta)
    checks.check_tensors(A_log=A_log, dt_bias=dt_bias)
    checks.check_no_transform("segment_summary", k, v, g, beta, A_log, dt_bias)
    checks.check_gate(use_gate_in_kernel, lower_bound, A_log, dt_bias, v)
    _check_beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if k.shape[0] != 1:
        raise UnsupportedProblemError(f"B = {k.shape[0]}; fragments lie in one sequence: join the batch along T")
    boundaries = checks.boundaries_of(offsets, name="offsets")
    check_boundaries(boundaries, k.shape[1], "offsets")
    heads = PlanHeads(k.shape[2], v.shape[2], k.shape[3])
    pack = plan_of_boundaries(boundaries, heads, k.device, SegmentRule(0, 0), summarize_all=True)
    M, B = OPERATORS.segment_summary(
        *(tensor[0] for tensor in (k, v, g, beta)),
        *_gate_parameters(A_log, dt_bias),
        pack.chunk_table,
        pack.segment_table,
        pack.summary_offsets,
        pack.num_summaries,
        lower_bound,
        use_qk_l2norm_in_kernel,
        gate_form_of(use_gate_in_kernel, lower_bound),
        beta_form_of(use_beta_sigmoid_in_kernel, allow_neg_eigval),
        need_M,
        need_B,
    )
    return M if need_M else None, B if need_B else None


def transfer_walk(
    M: torch.Tensor,
    B: torch.Tensor,
    initial: torch.Tensor | None,
    offsets: torch.Tensor,
    *,
    variant: str | None = None,
    precision_mode: int = 0,
    transpose: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Carry states through chains of affine summaries: ``S[f + 1] = M_f S[f] + B_f``, at fp32 accuracy.

    Shapes, all fp32: M ``[F, HV, K, K]``, B ``[F, HV, K, V]``, initial ``[N, HV, K, V]`` or None for zeros; offsets
    int32 or int64 ``[N + 1]``, each chain's first fragment. K = V in {64, 128}. Returns ``entry`` ``[F, HV, K, V]``,
    the state entering each fragment, and ``exit`` ``[N, HV, K, V]``, the state after each chain; an empty chain returns
    its initial state. ``transpose`` walks from each chain's end with ``M^T``: gradients of states.

    ``variant`` names the walk (``config.TRANSFER_WALKS``, or "default" whatever the environment names);
    ``precision_mode`` 1 or 2 are tf32_hilo's cheaper forms. Not differentiable: the transposed walk is its gradient.
    Errors: UnsupportedProblemError before any launch.
    """
    checks.check_required(M=M, B=B)
    checks.check_tensors(initial=initial)
    checks.check_no_transform("transfer_walk", M, B, initial)
    for name, tensor in (("M", M), ("B", B)):
        if tensor.dim() != 4:
            raise UnsupportedProblemError(f"{name} has shape {list(tensor.shape)}; expected four dimensions")
    fragments, value_heads, head_dim, value_dim = B.shape
    if value_heads < 1:
        raise UnsupportedProblemError(f"B has {value_heads} value heads; at least one is needed")
    if head_dim != value_dim or head_dim not in checks.HEAD_DIMS:
        raise UnsupportedProblemError(f"K = {head_dim}, V = {value_dim}; they must be equal and in {checks.HEAD_DIMS}")
    checks.check_shape("M", M, (fragments, value_heads, head_dim, head_dim), "[F, HV, K, K]")
    boundaries = checks.boundaries_of(offsets, name="offsets")
    check_boundaries(boundaries, fragments, "offsets", "fragments")
    for name, tensor in (("M", M), ("B", B)):
        checks.check_dtype(name, tensor, (torch.float32,), "summaries stay in float32")
    checks.check_same_device(B, M=M)
    state_shape = (len(boundaries) - 1, value_heads, head_dim, value_dim)
    checks.check_state("initial", initial, state_shape, "[N, HV, K, V]", B)
    table = offsets.to(device=B.device, dtype=torch.int64)
    return OPERATORS.transfer_walk(
        M.contiguous(),
        B.contiguous(),
        None if initial is None else initial.contiguous(),
        table,
        variant,
        precision_mode,
        transpose,
    )


def _check_beta_form(use_sigmoid: bool, allow_neg_eigval: bool) -> None:
    if allow_neg_eigval and not use_sigmoid:
        raise UnsupportedProblemError(
            "allow_neg_eigval=True doubles the sigmoid of beta; set use_beta_sigmoid_in_kernel=True too, or pass "
            "2 * sigmoid(beta) yourself"
        )


def _gate_parameters(
    A_log: torch.Tensor | None, dt_bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return A_log ``[HV]`` and dt_bias ``[HV * K]`` or ``[HV, K]``, contiguous, None where absent."""
    return tuple(None if parameter is None else parameter.contiguous() for parameter in (A_log, dt_bias))


def _check_conv_state(
    state: torch.Tensor | None, x: torch.Tensor, expected: tuple[int, int, int]
) -> torch.Tensor | None:
    """Return a convolution's initial state, contiguous; raises unless it fits x and the documents."""
    if state is None:
        return None
    checks.check_dtype("initial_state", state, (x.dtype, torch.float32), "states have x's dtype or float32")
    checks.check_shape("initial_state", state, expected, "[N, D, W - 1]")
    checks.check_same_device(x, initial_state=state)
    return state.contiguous()


def _conv_boundaries(x: torch.Tensor, cu_seqlens: torch.Tensor | None, plan: Plan | None) -> tuple[torch.Tensor, int]:
    """Return the table of document boundaries, int64 ``[N + 1]`` on x's device, and N."""
    batch, tokens = x.shape[:2]
    if (cu_seqlens is not None or plan is not None) and batch != 1:
        raise UnsupportedProblemError(
            f"B = {batch} with cu_seqlens or a plan; a pack has B = 1: join the batch along T"
        )
    if plan is not None:
        checks.check_plan_boundaries(plan, cu_seqlens)
        if (plan.num_tokens, plan.device) != (tokens, x.device):
            raise PlanMismatchError(
                f"x has {tokens} tokens on {x.device}; the plan was made for {plan.num_tokens} on {plan.device}"
            )
        return plan.cu_seqlens, plan.num_documents
    if cu_seqlens is None:
        return _batch_boundaries(x), batch
    boundaries = checks.pack_boundaries(tokens, cu_seqlens)
    return cu_seqlens.to(device=x.device, dtype=torch.int64, copy=True), len(boundaries) - 1


def _batch_boundaries(x: torch.Tensor) -> torch.Tensor:
    """The table of documents of equal lengths."""
    return torch.arange(x.shape[0] + 1, device=x.device) * x.shape[1]
