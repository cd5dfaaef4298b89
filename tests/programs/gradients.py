"""The backward programs of the chunk pipeline: launches into poisoned memory, and FP64 gradients by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from cake_kda_jit.reference import recurrent_kda, transfer_walk_reference

from .pipeline import (
    CHUNK,
    LOWER_BOUND,
    Pack,
    block_values,
    exact_chunk,
    gate_values,
    gradient_tile_of,
    launch,
    poisoned,
    record_of,
    run_prepare,
    run_summary,
    scan_values,
    value_tile_of,
)

INPUTS = ("q", "k", "v", "g", "beta")


def num_checkpoints(pack: Pack, checkpoint_chunks: int) -> int:
    return pack.tables.num_chunks // checkpoint_chunks + pack.tables.num_segments


def run_scan(pack: Pack, tiles: dict[str, Tensor], *, checkpoint_chunks=1, segment_entry=None) -> dict[str, Tensor]:
    """Launch chunk_scan; returns all that it can keep."""
    chunks, HV, K = pack.tables.num_chunks, pack.HV, pack.K
    outputs = {
        "o": poisoned(*pack.v.shape, dtype=pack.v.dtype),
        "final_state": poisoned(len(pack.lengths), HV, K, K),
        "h": poisoned(HV, chunks, K, K, dtype=pack.tile_dtype),
        "v_new": poisoned(*pack.value_tile(HV), dtype=pack.tile_dtype),
        "checkpoints": poisoned(num_checkpoints(pack, checkpoint_chunks), HV, K, K),
    }
    values = scan_values(pack, tiles) | {
        "initial_state": pack.initial_state,
        "segment_entry": segment_entry,
        "ready": None,
        "checkpoint_chunks": checkpoint_chunks,
    }
    launch(record_of("chunk_scan", pack.variant), values | outputs)
    return outputs


def run_grad_scan(pack: Pack, tiles: dict[str, Tensor], heads=None, num_threads=2, **given) -> dict[str, Tensor]:
    """Launch grad_scan; returns dS, z, dinitial_state, and h and v_new where checkpoints are given.

    ``heads`` is (first head, number of heads), ``tiles`` those of that block.
    """
    chunks, K, HB = pack.tables.num_chunks, pack.K, (heads or (0, pack.HV))[1]
    state_tile = (HB, chunks, K, K)
    names = {"dS": state_tile, "z": pack.gradient_tile(HB)}
    if given.get("checkpoints") is not None:
        names |= {"h": state_tile, "v_new": pack.value_tile(HB)}
    outputs = {name: poisoned(*shape, dtype=pack.tile_dtype) for name, shape in names.items()}
    outputs["dinitial_state"] = poisoned(len(pack.lengths), pack.HV, K, K)
    absent = dict.fromkeys(("checkpoints", "h", "v_new", "dfinal_state", "segment_dexit", "ready"))
    values = absent | scan_values(pack, tiles, heads, num_threads) | do_values(pack) | {"checkpoint_chunks": 1}
    launch(record_of("grad_scan", pack.variant), values | outputs | given)
    return outputs


def do_values(pack: Pack) -> dict[str, object]:
    return {"do_": pack.do, "do_strides": pack.do.stride()}


def grad_outputs(pack: Pack) -> dict[str, Tensor]:
    """Poisoned outputs of chunk_grad."""
    outputs = {
        "d" + name: poisoned(*tensor.shape, dtype=tensor.dtype)
        for name, tensor in ((name, getattr(pack, name)) for name in INPUTS)
    }
    if pack.gate_form != "ready":
        outputs["partial_A_log"] = poisoned(pack.tables.num_chunks, pack.HV)
        outputs["partial_dt_bias"] = poisoned(pack.tables.num_chunks, pack.HV, pack.K)
    return outputs


def grad_values(pack: Pack, edges: dict[str, Tensor], heads=None, num_threads=2) -> dict[str, object]:
    """All of chunk_grad's fields but its outputs; ``edges`` are h, v_new, dS and z of the block."""
    return {
        "partial_A_log": None,
        "partial_dt_bias": None,
        "v": pack.v,
        "v_strides": pack.v.stride(),
        "chunk_table": pack.tables.chunk_table,
        "num_chunks": pack.tables.num_chunks,
        **gate_values(pack),
        **do_values(pack),
        **block_values(pack, heads, num_threads),
        **edges,
    }


def run_chunk_grad(pack: Pack, edges: dict[str, Tensor], **options) -> dict[str, Tensor]:
    """Launch chunk_grad; returns the inputs' gradients and, where the gate has parameters, their partial sums."""
    outputs = grad_outputs(pack)
    launch(record_of("chunk_grad", pack.variant), grad_values(pack, edges, **options) | outputs)
    return outputs


def run_reduce(partial_A_log: Tensor, partial_dt_bias: Tensor, num_threads=2) -> dict[str, Tensor]:
    """Launch parameter_reduce; returns dA_log [HV] and ddt_bias [HV, K]."""
    chunks, HV, K = partial_dt_bias.shape
    outputs = {"dA_log": poisoned(HV), "ddt_bias": poisoned(HV, K)}
    values = {
        "partial_A_log": partial_A_log,
        "partial_dt_bias": partial_dt_bias,
        "num_chunks": chunks,
        "num_value_heads": HV,
        "head_dim": K,
        "num_threads": num_threads,
    }
    launch(record_of("parameter_reduce", "fp32"), values | outputs)
    return outputs


def run_walks(pack: Pack, tiles: dict[str, Tensor], dfinal_state: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """States entering and gradients leaving every segment with a summary row; (None, None) where there is none."""
    offsets = pack.tables.summary_offsets
    if not offsets[-1]:
        return None, None
    M, B = run_summary(pack, tiles)
    _, D = run_summary(pack, tiles, backward=1, M=None)
    entry, _ = transfer_walk_reference(M, B, pack.initial_state, offsets)
    dexit, _ = transfer_walk_reference(M, D, dfinal_state, offsets, transpose=True)
    return entry.float(), dexit.float()


def run_pipeline(pack: Pack, dfinal_state: Tensor, checkpoint_chunks=0) -> dict[str, Tensor]:
    """Every gradient of a pack, from its inputs; ``checkpoint_chunks`` replays h and v_new instead of keeping them."""
    tiles = run_prepare(pack)
    segment_entry, segment_dexit = run_walks(pack, tiles, dfinal_state)
    scanned = run_scan(pack, tiles, checkpoint_chunks=checkpoint_chunks or 1, segment_entry=segment_entry)
    given = {"dfinal_state": dfinal_state, "segment_dexit": segment_dexit}
    if checkpoint_chunks:
        given |= {"checkpoints": scanned["checkpoints"], "checkpoint_chunks": checkpoint_chunks}
    reverse = run_grad_scan(pack, tiles, **given)
    dinitial_state = reverse.pop("dinitial_state")
    found = run_chunk_grad(pack, {name: scanned[name] for name in ("h", "v_new")} | reverse)
    if pack.gate_form != "ready":
        found |= run_reduce(found.pop("partial_A_log"), found.pop("partial_dt_bias"))
    return found | {"dinitial_state": dinitial_state}


def exact_gradients(
    pack: Pack, boundaries: list[int], initial_state: Tensor, dfinal_state: Tensor
) -> dict[str, Tensor]:
    """FP64 gradients of the recurrence by autograd, the pack being cut into documents at ``boundaries``."""
    tensors = {name: getattr(pack, name) for name in (*INPUTS, "A_log", "dt_bias")} | {"initial_state": initial_state}
    leaves = {name: x.double().requires_grad_() for name, x in tensors.items() if x is not None}
    o, final_state = recurrent_kda(
        *(leaves[name].unsqueeze(0) for name in INPUTS),
        cu_seqlens=boundaries,
        scale=pack.scale,
        use_qk_l2norm_in_kernel=pack.l2norm,
        use_gate_in_kernel=pack.gate_form != "ready",
        lower_bound=LOWER_BOUND if pack.gate_form == "bounded" else None,
        use_beta_sigmoid_in_kernel=pack.beta_form != "ready",
        allow_neg_eigval=pack.beta_form == "two_sigmoid",
        **{name: leaf for name, leaf in leaves.items() if name not in INPUTS},
    )
    torch.autograd.backward([o, final_state], [pack.do.double().unsqueeze(0), dfinal_state.double()])
    return {"d" + name: leaf.grad for name, leaf in leaves.items()}


def exact_A_log_terms(pack: Pack, dg: Tensor) -> Tensor:
    """The [T, HV, K] summands of dA_log in FP64, from the gradient of the raw gate."""
    x = pack.g.double() + (0.0 if pack.dt_bias is None else pack.dt_bias.double())
    return dg * (x if pack.gate_form == "bounded" else torch.nn.functional.softplus(x) / x.sigmoid())


def chunk_boundaries(pack: Pack) -> list[int]:
    return [0, *(token + count for _, token, count, _ in pack.tables.chunks())]


def random_edges(pack: Pack, seed=1, second_parts=True) -> dict[str, Tensor]:
    """Random h and dS at the edges of every chunk, as tiles, with the v' and z that FP64 makes of them.

    Without second parts, bf16 tiles hold v' and z rounded.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (pack.HV, pack.tables.num_chunks, pack.K, pack.K)
    h, dS = (torch.randn(*shape, generator=generator).to(pack.tile_dtype) for _ in range(2))
    v_new, z = (torch.zeros(*shape[:2], CHUNK, pack.K, dtype=torch.float64) for _ in range(2))
    for n, (_, token, count, _) in enumerate(pack.tables.chunks()):
        chunk = exact_chunk(pack, n)
        v, do = (x[token : token + count].double().transpose(0, 1) for x in (pack.v, pack.do))
        S, dS_out = h[:, n].double().mT, dS[:, n].double().mT
        v_new[:, n, :count] = chunk.Tinv @ (chunk.beta * (v - chunk.ke @ S))
        z[:, n, :count] = chunk.Tinv.mT @ (chunk.Aqk.mT @ do + chunk.kg @ dS_out)
    if not second_parts:
        v_new, z = (x.to(pack.tile_dtype).double() for x in (v_new, z))
    return {
        "h": h,
        "v_new": value_tile_of(v_new, pack.tile_dtype),
        "dS": dS,
        "z": gradient_tile_of(z, pack.tile_dtype),
    }


def exact_chunk_gradients(pack: Pack, edges: dict[str, Tensor]) -> dict[str, Tensor]:
    """FP64 gradients of every chunk as a document of its own, with h as initial state and dS at its end."""
    h, dS = (edges[name].double().transpose(0, 1).mT for name in ("h", "dS"))
    return exact_gradients(pack, chunk_boundaries(pack), h, dS)
