"""Packs for the programs of the chunk pipeline: inputs, tables, launches into poisoned memory, FP64 tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module

import torch
from torch import Tensor

from cake_kda_jit.arch import host_arch
from cake_kda_jit.ops.select import SegmentRule
from cake_kda_jit.programs.attention_fields import BETA_FORMS, DTYPE_CODES, GATE_FORMS
from cake_kda_jit.programs.tile_fields import GRADIENT_ROWS, VALUE_ROWS
from cake_kda_jit.record import Record
from cake_kda_jit.reference import beta as transform_beta
from cake_kda_jit.reference import gate, l2norm
from cake_kda_jit.runtime.load import get_kernel

FUSED = {"gate_form": "bounded", "beta_form": "sigmoid", "l2norm": True}
"""Every transform of the inputs in the kernels."""

CHUNK = 64
LOWER_BOUND = -5.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CODES = {DTYPES[name]: code for name, code in DTYPE_CODES.items()}
TILE_NAMES = ("ke", "qg", "kg", "Aqk", "Tinv", "decay_total")

# Of a program of the pipeline, whatever else it takes.
BAD_BLOCKS = {
    "no heads": ({"num_heads": 0}, "num_heads is 0; it must be at least 1"),
    "odd groups": ({"num_heads": 3}, "num_value_heads is 4; it must be a positive multiple of num_heads, which is 3"),
    "past the heads": ({"first_head": 2, "num_block_heads": 4}, r"the head block is \[2, 2 \+ 4\)"),
    "empty block": ({"num_block_heads": 0}, "part of the 4 value heads, and not empty"),
    "half a group": ({"first_head": 1, "num_block_heads": 2}, "whole groups of 2 value heads"),
    "no threads": ({"num_threads": 0}, "num_threads is 0"),
    "beta dtype": ({"beta_dtype": 3}, "beta_dtype is 3"),
    "beta form": ({"beta_form": -1}, "beta_form is -1"),
    "negative chunks": ({"num_chunks": -1}, "num_chunks is -1"),
    "no table": ({"chunk_table": None}, "chunk_table is null"),
    "no beta": ({"beta": None}, "beta is null"),
}

# A product of 64 decays, a sum of 128 products and a substitution over 64 rows round by 6e-8 each: 1e-6 in norm. An
# element may be small beside the terms it is made of, hence ten times that for single ones.
FP32_TOLERANCE = 1e-5
# Half a unit in the last place of a number just above a power of two, relative to it.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0, torch.float64: 0.0}


@dataclass(frozen=True, eq=False)
class Tables:
    """What pack_tables writes."""

    chunk_table: Tensor
    segment_table: Tensor
    summary_offsets: Tensor

    @property
    def num_chunks(self) -> int:
        return len(self.chunk_table)

    @property
    def num_segments(self) -> int:
        return len(self.segment_table)

    def values(self) -> dict[str, object]:
        return {
            "chunk_table": self.chunk_table,
            "segment_table": self.segment_table,
            "num_chunks": self.num_chunks,
            "num_segments": self.num_segments,
        }

    def chunks(self) -> list[tuple[int, int, int, int]]:
        return [tuple(row) for row in self.chunk_table.tolist()]

    def segments(self) -> list[tuple[int, int, int, int]]:
        return [tuple(row) for row in self.segment_table.tolist()]


@dataclass(frozen=True, eq=False)
class Pack:
    """Inputs of one call: q, k [T, H, K], v, do [T, HV, V], g [T, HV, K], beta [T, HV], documents, options."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    do: Tensor
    lengths: tuple[int, ...]
    initial_state: Tensor | None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    gate_form: str = "ready"
    beta_form: str = "ready"
    l2norm: bool = False
    scale: float = 0.3
    tables: Tables | None = None

    @property
    def K(self) -> int:
        return self.q.shape[2]

    @property
    def HV(self) -> int:
        return self.v.shape[1]

    @property
    def variant(self) -> str:
        """The twin of the CUDA record, with its bf16 tiles, or the fp32 record."""
        dtype = next(name for name, dtype in DTYPES.items() if dtype is self.q.dtype)
        return f"{dtype}_k{self.K}" + ("" if dtype == "fp32" else "_tiles_bf16")

    @property
    def tile_dtype(self) -> torch.dtype:
        return torch.float32 if self.q.dtype is torch.float32 else torch.bfloat16

    def value_tile(self, num_heads: int) -> tuple[int, ...]:
        """The shape of the tiles of v'."""
        return num_heads, self.tables.num_chunks, VALUE_ROWS[self.tile_dtype.itemsize], self.K

    def gradient_tile(self, num_heads: int) -> tuple[int, ...]:
        """The shape of the tiles of z."""
        return num_heads, self.tables.num_chunks, GRADIENT_ROWS[self.tile_dtype.itemsize], self.K

    def boundaries(self) -> list[int]:
        return torch.tensor([0, *self.lengths]).cumsum(0).tolist()

    def cut(self, segment_tokens: int, **options) -> Pack:
        """The same pack with its documents cut into segments."""
        return replace(self, tables=make_tables(self.lengths, segment_tokens, **options))


def record_of(program: str, variant: str) -> Record:
    """A program's cpu record, from its module."""
    records = import_module(f"cake_kda_jit.programs.{program}").PROGRAM.records
    return next(record for record in records if record.variant == variant and record.family == "cpu")


def launch(record: Record, values: dict[str, object]) -> None:
    """Launch with tensors in place of their addresses."""
    addresses = {name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in values.items()}
    get_kernel(record, host_arch()).launch(addresses)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory in which an element that is never written is NaN."""
    return torch.full(shape, float("nan"), dtype=dtype)


def value_tile_of(v_new: Tensor, dtype: torch.dtype) -> Tensor:
    """The tile of v' [.., 64, V]: of bf16 with a second part."""
    rounded = v_new.to(dtype)
    return rounded if dtype is torch.float32 else torch.cat([rounded, (v_new - rounded.double()).to(dtype)], dim=-2)


def gradient_tile_of(z: Tensor, dtype: torch.dtype) -> Tensor:
    """The tile of z [.., 64, V]: of bf16 with bytes of its bits behind the rounded rows."""
    rounded = z.float().to(dtype)
    if dtype is torch.float32:
        return rounded
    above = z.float().view(torch.int32) - (rounded.view(torch.int16).int() << 16)
    rest = ((above + 0x8080) >> 8).clamp(max=0xFF).to(torch.uint8)
    return torch.cat([rounded, rest.flatten(-2).view(dtype).unflatten(-1, (-1, z.shape[-1]))], dim=-2)


def whole_values(tile: Tensor) -> Tensor:
    """v' [.., 64, V] in FP64, the sum of its parts."""
    return sum(part.double() for part in tile.split(CHUNK, dim=-2))


def whole_gradients(tile: Tensor) -> Tensor:
    """z [.., 64, V] in FP64, with the bytes that its bf16 tile has behind the rounded rows."""
    if tile.dtype is torch.float32:
        return tile.double()
    rounded, rest = tile.split([CHUNK, CHUNK // 2], dim=-2)
    above = rest.flatten(-2).contiguous().view(torch.uint8).view(rounded.shape).int() * 0x100 - 0x8000
    return ((rounded.contiguous().view(torch.int16).int() << 16) + above).view(torch.float32).double()


def table_values(lengths, segment_tokens=0, *, max_chunks, max_segments, minimum=0, summarize_all=0, most_segments=0):
    """The argument block of pack_tables and, of it, the tables; these hold rows that no pack has."""
    tables = Tables(
        torch.full((max_chunks, 4), -7, dtype=torch.int32),
        torch.full((max_segments, 4), -7, dtype=torch.int32),
        torch.full((len(lengths) + 1,), -7, dtype=torch.int64),
    )
    values = {
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        "chunk_table": tables.chunk_table,
        "segment_table": tables.segment_table,
        "summary_offsets": tables.summary_offsets,
        "num_documents": len(lengths),
        "max_chunks": max_chunks,
        "max_segments": max_segments,
        "segment_tokens": segment_tokens,
        "segment_minimum": minimum,
        "most_segments": most_segments,
        "summarize_all": summarize_all,
        "num_threads": 1,
    }
    return values, tables


def make_tables(lengths, segment_tokens=0, **options) -> Tables:
    """Launch pack_tables with tables of just the rows that the pack needs."""
    rule = SegmentRule(segment_tokens, options.get("minimum", 0), options.get("most_segments", 0))
    max_chunks = sum(-(-length // CHUNK) for length in lengths)
    max_segments = sum(map(rule.num_segments, lengths))
    values, tables = table_values(lengths, segment_tokens, max_chunks=max_chunks, max_segments=max_segments, **options)
    launch(record_of("pack_tables", "int64"), values)
    return tables


def make_pack(lengths, variant="fp32_k64", *, H=1, HV=2, gate_form="softplus", g_dtype=None, seed=0, **options) -> Pack:
    """A random pack; gates of about -1.4 (ready), -0.4 (softplus) or -2.5 (bounded)."""
    dtype_name, _, K = variant.partition("_k")
    dtype, K, T, N = DTYPES[dtype_name], int(K), sum(lengths), len(lengths)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    q, k, v, do = (normal(T, heads, K).to(dtype) for heads in (H, H, HV, HV))
    if not options.get("l2norm"):
        # The delta rule is stable for keys of norm at most 1 only.
        k = (k.float() / k.float().norm(dim=-1, keepdim=True) * 0.99).to(dtype)
    raw_g, raw_beta = normal(T, HV, K), normal(T, HV)
    g = -raw_g.square() - 0.4 if gate_form == "ready" else raw_g
    beta = raw_beta.sigmoid() if options.get("beta_form", "ready") == "ready" else raw_beta
    if gate_form != "ready":
        bias = normal(HV, K) - (1.0 if gate_form == "softplus" else 0.0)
        options = {"A_log": 0.5 * normal(HV), "dt_bias": bias} | options
    options = {"initial_state": normal(N, HV, K, K)} | options
    g, beta = g.to(g_dtype or dtype), beta.to(g_dtype or dtype)
    tables = make_tables(lengths)
    return Pack(q, k, v, g, beta, do, tuple(lengths), gate_form=gate_form, tables=tables, **options)


def block_values(pack: Pack, heads: tuple[int, int] | None, num_threads: int = 2) -> dict[str, object]:
    """The fields that all programs of the pipeline share; ``heads`` is (first head, number of heads) of the block."""
    first_head, num_block_heads = heads or (0, pack.HV)
    return {
        "beta": pack.beta,
        "beta_strides": pack.beta.stride(),
        "num_heads": pack.q.shape[1],
        "num_value_heads": pack.HV,
        "first_head": first_head,
        "num_block_heads": num_block_heads,
        "beta_dtype": CODES[pack.beta.dtype],
        "beta_form": BETA_FORMS[pack.beta_form],
        "num_threads": num_threads,
    }


def gate_values(pack: Pack) -> dict[str, object]:
    """The fields of the gate, of q and k, and of their transforms."""
    values = {name: getattr(pack, name) for name in ("q", "k", "g")}
    values |= {f"{name}_strides": tensor.stride() for name, tensor in values.items()}
    return values | {
        "A_log": pack.A_log,
        "dt_bias": pack.dt_bias,
        "scale": pack.scale,
        "lower_bound": LOWER_BOUND,
        "g_dtype": CODES[pack.g.dtype],
        "gate_form": GATE_FORMS[pack.gate_form],
        "use_qk_l2norm": int(pack.l2norm),
    }


def make_tiles(pack: Pack, num_heads: int) -> dict[str, Tensor]:
    """Poisoned outputs of chunk_prepare."""
    chunks, dtype = pack.tables.num_chunks, pack.tile_dtype
    columns = {"ke": pack.K, "qg": pack.K, "kg": pack.K, "Aqk": CHUNK, "Tinv": CHUNK}
    tiles = {name: poisoned(num_heads, chunks, CHUNK, width, dtype=dtype) for name, width in columns.items()}
    return tiles | {"decay_total": poisoned(num_heads, chunks, pack.K)}


BEHIND = {"ready": None, "num_followers": 0, "num_ahead": 0, "from_last": 0}
"""Fields of chunk_prepare where no scan begins beside it."""


def run_prepare(pack: Pack, heads=None, num_threads=2, **replaced) -> dict[str, Tensor]:
    """Launch chunk_prepare; returns its tiles, those that ``replaced`` sets to None left out."""
    tiles = make_tiles(pack, (heads or (0, pack.HV))[1])
    tables = {"chunk_table": pack.tables.chunk_table, "num_chunks": pack.tables.num_chunks}
    values = block_values(pack, heads, num_threads) | gate_values(pack) | BEHIND | tables | tiles | replaced
    launch(record_of("chunk_prepare", pack.variant), values)
    return {name: tile for name, tile in tiles.items() if values[name] is not None}


def scan_values(pack: Pack, tiles: dict[str, Tensor], heads=None, num_threads=2) -> dict[str, object]:
    """The fields of chunk_scan and segment_summary beside their own: tiles, v and the tables."""
    v = {"v": pack.v, "v_strides": pack.v.stride()}
    return block_values(pack, heads, num_threads) | pack.tables.values() | tiles | v


def run_summary(pack: Pack, tiles, *, heads=None, num_threads=2, backward=0, **replaced):
    """Launch segment_summary; returns M and B (D backwards), None where ``replaced`` says so."""
    rows = int(pack.tables.summary_offsets[-1])
    outputs = {name: poisoned(rows, pack.HV, pack.K, pack.K) for name in "MB"}
    options = {"backward": backward, "skip_first_M": 0, "skip_first_B": 0, "skip_last_B": 0}
    gradient = {"do_": pack.do, "do_strides": pack.do.stride()}
    values = scan_values(pack, tiles, heads, num_threads) | gradient | options | outputs | replaced
    launch(record_of("segment_summary", pack.variant), values)
    return tuple(values[name] for name in "MB")


@dataclass(frozen=True, eq=False)
class ExactChunk:
    """One chunk of all heads in FP64: q, k normalised and on value heads, with what chunk_prepare makes of them.

    q, k, ke, qg, kg [HV, L, K], beta [HV, L, 1], Akk, Aqk, Tinv [HV, L, L], total [HV, K].
    """

    q: Tensor
    k: Tensor
    beta: Tensor
    ke: Tensor
    qg: Tensor
    kg: Tensor
    Aqk: Tensor
    Tinv: Tensor
    decay_total: Tensor


def exact_chunk(pack: Pack, chunk: int) -> ExactChunk:
    """FP64 tiles of one chunk, by products over every pair of rows."""
    _, token, count, _ = pack.tables.chunks()[chunk]
    rows = slice(token, token + count)
    q, k = (x[rows].double().transpose(0, 1) for x in (pack.q, pack.k))
    if pack.l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (x.repeat_interleave(pack.HV // pack.q.shape[1], dim=0) for x in (q, k))
    decay = log_decay(pack)[rows].transpose(0, 1).exp()
    beta = exact_beta(pack)[rows].T.unsqueeze(-1)
    pair = decay.new_zeros(pack.HV, count, count, pack.K)  # [i, j] = d_(j+1) ... d_i
    for j in range(count):
        pair[:, j, j] = 1.0
        pair[:, j + 1 :, j] = decay[:, j + 1 :].cumprod(dim=1)
    reach = pair * k.unsqueeze(1)
    Akk = beta * (reach @ k.unsqueeze(-1)).squeeze(-1).tril(-1)
    identity = torch.eye(count, dtype=torch.float64).expand_as(Akk)
    to_start = decay.cumprod(dim=1)
    return ExactChunk(
        q=q,
        k=k,
        beta=beta,
        ke=k * to_start,
        qg=pack.scale * q * to_start,
        kg=k * pair[:, -1],
        Aqk=pack.scale * (reach @ q.unsqueeze(-1)).squeeze(-1),
        Tinv=torch.linalg.solve_triangular(identity + Akk, identity, upper=False, unitriangular=True),
        decay_total=to_start[:, -1],
    )


def exact_beta(pack: Pack) -> Tensor:
    """The write strength [T, HV] in FP64."""
    is_raw, is_doubled = pack.beta_form != "ready", pack.beta_form == "two_sigmoid"
    return transform_beta(pack.beta.double(), sigmoid=is_raw, allow_neg_eigval=is_doubled)


def log_decay(pack: Pack) -> Tensor:
    """The ready gate [T, HV, K] in FP64."""
    g = pack.g.double()
    if pack.gate_form == "ready":
        return g
    parameters = (None if x is None else x.double() for x in (pack.A_log, pack.dt_bias))
    return gate(g, *parameters, LOWER_BOUND if pack.gate_form == "bounded" else None)


def edited(table: Tensor, row: int, column: int, value: int) -> Tensor:
    """A copy of a table with one entry changed."""
    table = table.clone()
    table[row, column] = value
    return table


def assert_near(name: str, found: Tensor, expected: Tensor, tolerance: float = FP32_TOLERANCE) -> None:
    """Every element within one rounding of its dtype, and `tolerance` of itself and of the tensor's rms."""
    assert found.shape == expected.shape, name
    assert torch.isfinite(found).all(), name
    if found.numel():
        rms = expected.square().mean().sqrt()
        bound = (ROUNDING[found.dtype] + tolerance) * expected.abs() + tolerance * rms
        worst = ((found.double() - expected).abs() / bound.clamp_min(1e-30)).max().item()
        assert worst <= 1.0, f"{name}: an element is off by {worst:.3g} times its tolerance"


def assert_equal_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        assert torch.equal(tensor.view(integers), expected[name].view(integers)), name
