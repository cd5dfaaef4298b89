"""``chunk_prepare``: norms, gate, decays, Akk, Aqk, Tinv and the decayed q and k of every chunk."""

from __future__ import annotations

from ..record import Field, Program, cpu_entry
from .common import cpu_tile_records, sm90_tile_records, smxx_tile_records
from .tile_fields import BETA, GATE, HEAD_BLOCK, PREPARED_TILES, READY

FIELDS = (
    (
        Field("q", "ptr", "[T, H, K], or null: qg and Aqk are then not formed"),
        Field("k", "ptr", "[T, H, K]"),
        Field("g", "ptr", "[T, HV, K] gate: ready (natural log of the decay) or raw"),
        Field("beta", "ptr", "[T, HV]"),
        Field("A_log", "ptr", "[HV] fp32 or null"),
        Field("dt_bias", "ptr", "[HV, K] fp32 or null"),
        Field("chunk_table", "ptr", "[chunks, 4] int32: document (-1: none), first token, tokens, segment"),
    )
    + PREPARED_TILES  # each may be null: not wanted
    + (
        READY,
        Field("q_strides", "strides(3)", "elements per token, head, channel"),
        Field("k_strides", "strides(3)", "elements per token, head, channel"),
        Field("g_strides", "strides(3)", "elements per token, head, channel"),
        Field("beta_strides", "strides(2)", "elements per token, head"),
        Field("num_chunks", "i64", "rows of chunk_table"),
        Field("scale", "f32", "factor of qg and Aqk"),
        Field("lower_bound", "f32", "bound of the bounded gate, in [-5, 0)"),
    )
    + HEAD_BLOCK
    + GATE
    + BETA
    + (
        Field("use_qk_l2norm", "i32", "1: q and k are divided by their norm"),
        Field("from_last", "i32", "1: with `ready`, the last chunks come first, as a reverse scan wants them"),
        Field("num_followers", "i32", "CTAs that wait for `ready`, each alone on a processor"),
        Field("num_ahead", "i32", "tiles that are begun before CTAs leave their processors to those"),
    )
)

ENTRY = cpu_entry(FIELDS)

PROGRAM = Program(
    name="chunk_prepare",
    summary="the tiles of every chunk, one task per (chunk, value head)",
    records=cpu_tile_records("chunk_prepare", ENTRY)
    + smxx_tile_records("chunk_prepare", FIELDS)
    + tuple(r for r in sm90_tile_records("chunk_prepare", FIELDS) if dict(r.params)["head_dim"] == 128),
    bytes_note="per (token, value head), K = 128, 16-bit inputs: 768 of q, k, g, 1,024 of tiles, 8 of decay_total",
)
