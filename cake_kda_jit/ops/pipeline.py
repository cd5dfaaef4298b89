"""One method per program of the chunk pipeline: tensors in, argument values out, launched on their device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch

from ..programs.attention_fields import BETA_FORMS, DTYPE_CODES, GATE_FORMS
from ..programs.tile_fields import GRADIENT_ROWS, VALUE_ROWS
from .checks import DTYPE_NAMES
from .inputs import Inputs, Transforms
from .problem import CHUNK_TOKENS
from .select import Following, ScanSizes, select_attention, select_following, select_plain, select_walk
from .workspace import HeadBlock, tile_bytes, tile_bytes_per_head


def address(tensor: torch.Tensor | int | None) -> int | None:
    """Return a tensor's address, None (a null pointer) for an absent tensor; an address is returned as it is."""
    return tensor if tensor is None or isinstance(tensor, int) else tensor.data_ptr()


def tile_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of chunk tiles: fp32 in the cpu family, bf16 on a GPU.

    It is the ``tile_dtype`` of the shipped records, known without choosing one: a traced shape cannot choose.
    """
    return torch.float32 if device.type == "cpu" else torch.bfloat16


@dataclass
class Tiles:
    """Chunk tiles of one head block, ``[HB, chunks, ...]``; None where a tile is not wanted or not read.

    A tile is a tensor, or its address in ``memory``.
    """

    ke: torch.Tensor | int | None = None
    qg: torch.Tensor | int | None = None
    kg: torch.Tensor | int | None = None
    Aqk: torch.Tensor | int | None = None
    Tinv: torch.Tensor | int | None = None
    decay_total: torch.Tensor | int | None = None
    memory: torch.Tensor | None = None
    following: Following | None = None
    """How a scan begins beside the ``chunk_prepare`` of its tiles, and in ``ready`` which ones are there; or None."""
    ready: torch.Tensor | None = None

    def values(self) -> dict[str, object]:
        """The values of the argument fields of prepared tiles."""
        return {
            "ke": address(self.ke),
            "qg": address(self.qg),
            "kg": address(self.kg),
            "Aqk": address(self.Aqk),
            "Tinv": address(self.Tinv),
            "decay_total": address(self.decay_total),
        }


@dataclass(frozen=True)
class Pipeline:
    """One packed attention call on its way through the programs.

    ``family`` forces a family, None lets ``select`` choose. ``transfer_walk`` and ``precision_mode`` name the walk, as
    in ``select_walk``.
    """

    inputs: Inputs
    transforms: Transforms
    family: str | None
    transfer_walk: str | None = None
    precision_mode: int = 0

    @cached_property
    def tile_dtype(self) -> torch.dtype:
        """The dtype in which the programs keep their tiles."""
        return tile_dtype(self.inputs.device)

    @cached_property
    def num_chunks(self) -> int:
        """Chunks of the pack."""
        return self.inputs.chunk_table.shape[0]

    def make_tiles(
        self, block: HeadBlock, *names: str, memory: torch.Tensor | None = None, **given: torch.Tensor | None
    ) -> Tiles:
        """Return the named tiles, cut from one allocation, beside those given; what is given as None is cut too.

        An allocation for each would take the host longer than the launches that use them. ``memory`` is that of tiles
        that were made before, of the same names: they are found there again.
        """
        named = [*names, *(name for name, tensor in given.items() if tensor is None)]
        if not named:
            return Tiles(**given)
        addresses, num_bytes = {}, 0
        for name in named:
            addresses[name] = num_bytes
            num_bytes += block.count * self._tile_bytes[name]
        memory = self._empty((num_bytes,), torch.uint8) if memory is None else memory
        start = memory.data_ptr()
        given = {name: tensor for name, tensor in given.items() if tensor is not None}
        return Tiles(**{name: start + offset for name, offset in addresses.items()}, **given, memory=memory)

    def scratch_bytes(self, *, states: int, values: int, kept: Collection[str] = ()) -> int:
        """Return the scratch of one value head, as ``tile_bytes_per_head``."""
        return tile_bytes_per_head(*self._sizes, states=states, values=values, kept=kept)

    @cached_property
    def _sizes(self) -> tuple[int, int, int]:
        return self.num_chunks, self.inputs.head_dim, self.tile_dtype.itemsize

    @cached_property
    def _tile_bytes(self) -> dict[str, int]:
        return tile_bytes(*self._sizes)

    def values(self, block: HeadBlock) -> torch.Tensor:
        """Return an empty tile tensor of v', ``[HB, chunks, 64 or 128, V]``."""
        return self._tile(block, VALUE_ROWS[self.tile_dtype.itemsize], self.inputs.head_dim)

    def gradients(self, block: HeadBlock) -> torch.Tensor:
        """Return an empty tile tensor of z, ``[HB, chunks, 64 or 96, V]``."""
        return self._tile(block, GRADIENT_ROWS[self.tile_dtype.itemsize], self.inputs.head_dim)

    def states(self, block: HeadBlock) -> torch.Tensor:
        """Return an empty tile tensor ``[HB, chunks, V, K]``."""
        return self._tile(block, self.inputs.head_dim, self.inputs.head_dim)

    def summaries(self) -> torch.Tensor:
        """Return an empty fp32 tensor ``[summary rows, HV, K, K]``."""
        inputs = self.inputs
        return self._empty((inputs.num_summaries, inputs.num_value_heads, inputs.head_dim, inputs.head_dim))

    def prepare(self, block: HeadBlock, tiles: Tiles) -> None:
        """``chunk_prepare``: fill the tiles that are not None."""
        inputs, transforms = self.inputs, self.transforms
        self._launch(
            "chunk_prepare",
            tiles.values() | self._strided("q", "k", "g", "beta") | self._block(block) | self._gate | self._beta,
            chunk_table=inputs.chunk_table.data_ptr(),
            num_chunks=self.num_chunks,
            scale=transforms.scale,
            use_qk_l2norm=int(transforms.use_qk_l2norm),
            ready=address(tiles.ready),
            from_last=int(tiles.following.from_last) if tiles.following else 0,
            num_followers=tiles.following.num_ctas if tiles.following else 0,
            num_ahead=tiles.following.num_ahead if tiles.following else 0,
        )

    def following(self, block: HeadBlock, scan: str) -> Following | None:
        """Return how a scan of a block begins beside its ``prepare``, None where it follows behind."""
        inputs = self.inputs
        if inputs.device.type != "cuda":
            return None
        processors = torch.cuda.get_device_properties(inputs.device).multi_processor_count
        sizes = ScanSizes(inputs.segment_table.shape[0], self.num_chunks, block.count, processors)
        return select_following(inputs.problem, self.family, scan, sizes)

    def overlap(self, block: HeadBlock, tiles: Tiles, scan: str) -> None:
        """Let the scan of the tiles, right behind their ``prepare``, begin beside it where that is faster.

        ``scan`` is one of ``SCAN_WALKS``.
        """
        tiles.following = self.following(block, scan)
        if tiles.following:
            tiles.ready = self._empty((2 + block.count * self.num_chunks,), torch.int32)

    def scan(
        self,
        block: HeadBlock,
        tiles: Tiles,
        segment_entry,
        outputs: dict[str, torch.Tensor | None],
        checkpoint_tokens: int,
    ) -> None:
        """``chunk_scan``: states, v' and o of a block; ``outputs`` are o, final_state, h, v_new, checkpoints."""
        self._launch(
            "chunk_scan",
            tiles.values() | self._strided("v", "beta") | self._tables | self._block(block) | self._beta,
            is_beside=tiles.ready is not None,
            initial_state=address(self.inputs.initial_state),
            segment_entry=address(segment_entry),
            ready=address(tiles.ready),
            checkpoint_chunks=checkpoint_tokens // CHUNK_TOKENS,
            **{name: address(tensor) for name, tensor in outputs.items()},
        )

    def summarize(self, block: HeadBlock, tiles: Tiles, *, M, B, do=None, skip: dict[str, bool]) -> None:
        """``segment_summary``: M and B of a block's segments, or D in B where ``do`` is given."""
        self._launch(
            "segment_summary",
            tiles.values() | self._strided("v", "beta") | self._tables | self._block(block) | self._beta,
            do_=address(do),
            do_strides=(0, 0, 0) if do is None else do.stride()[-3:],
            M=address(M),
            B=address(B),
            backward=int(do is not None),
            **{f"skip_{name}": int(value) for name, value in skip.items()},
        )

    def walk(self, block: HeadBlock, M: torch.Tensor, B: torch.Tensor, initial, *, transpose: bool) -> torch.Tensor:
        """``transfer_walk`` of a block over each document's segments; returns what enters each."""
        inputs = self.inputs
        chosen = select_walk(
            inputs.problem.arch,
            self.transfer_walk,
            self.precision_mode,
            self.family,
            num_walks=inputs.num_documents * block.count,
            head_dim=inputs.head_dim,
        )
        entry = inputs.empty_like(B)
        values = {
            "M": M.data_ptr(),
            "B": B.data_ptr(),
            "initial": address(initial),
            "offsets": inputs.summary_offsets.data_ptr(),
            "entry": entry.data_ptr(),
            "exit": None,
            "num_chains": inputs.num_documents,
            "num_value_heads": inputs.num_value_heads,
            "first_head": block.first,
            "num_block_heads": block.count,
            "head_dim": inputs.head_dim,
            "transpose": int(transpose),
        }
        inputs.executor.launch(chosen.record, chosen.reason, values, inputs.device)
        return entry

    def grad_scan(
        self,
        block: HeadBlock,
        tiles: Tiles,
        do: torch.Tensor,
        tensors: dict[str, torch.Tensor | None],
        checkpoint_tokens: int,
    ) -> None:
        """``grad_scan``: dS, z, dinitial_state, and h and v' again where checkpoints are given."""
        self._launch(
            "grad_scan",
            tiles.values() | self._strided("v", "beta") | self._tables | self._block(block) | self._beta,
            is_beside=tiles.ready is not None,
            ready=address(tiles.ready),
            do_=do.data_ptr(),
            do_strides=do.stride()[-3:],
            checkpoint_chunks=checkpoint_tokens // CHUNK_TOKENS,
            **{name: address(tensor) for name, tensor in tensors.items()},
        )

    def grad(self, block: HeadBlock, do: torch.Tensor, tensors: dict[str, torch.Tensor | None]) -> None:
        """``chunk_grad``: gradients of a block; ``tensors`` are h, v_new, dS, z, the gradients and the partials."""
        inputs, transforms = self.inputs, self.transforms
        self._launch(
            "chunk_grad",
            self._strided("q", "k", "v", "g", "beta") | self._block(block) | self._gate | self._beta,
            do_=do.data_ptr(),
            do_strides=do.stride()[-3:],
            chunk_table=inputs.chunk_table.data_ptr(),
            num_chunks=self.num_chunks,
            scale=transforms.scale,
            use_qk_l2norm=int(transforms.use_qk_l2norm),
            **{name: address(tensor) for name, tensor in tensors.items()},
        )

    def reduce_parameters(self, partial_A_log, partial_dt_bias, dA_log, ddt_bias) -> None:
        """``parameter_reduce``: dA_log and ddt_bias from the chunks' partial sums."""
        inputs = self.inputs
        chosen = select_plain("parameter_reduce", "fp32", inputs.problem.arch, self.family)
        values = {
            "partial_A_log": address(partial_A_log),
            "partial_dt_bias": address(partial_dt_bias),
            "dA_log": address(dA_log),
            "ddt_bias": address(ddt_bias),
            "num_chunks": self.num_chunks,
            "num_value_heads": inputs.num_value_heads,
            "head_dim": inputs.head_dim,
        }
        inputs.executor.launch(chosen.record, chosen.reason, values, inputs.device)

    def _launch(self, program: str, groups: dict[str, object], *, is_beside: bool = False, **values: object) -> None:
        inputs = self.inputs
        chosen = select_attention(program, inputs.problem, self.family)
        reason = f"{chosen.reason}; begins beside the launch ahead" if is_beside else chosen.reason
        inputs.executor.launch(chosen.record, reason, groups | values, inputs.device, is_beside=is_beside)

    def _tile(self, block: HeadBlock, rows: int, columns: int) -> torch.Tensor:
        return self._empty((block.count, self.num_chunks, rows, columns), self.tile_dtype)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.inputs.empty(shape, dtype)

    def _strided(self, *names: str) -> dict[str, object]:
        values: dict[str, object] = {}
        for name in names:
            tensor = getattr(self.inputs, name)
            values[name] = address(tensor)
            rank = 2 if name == "beta" else 3
            values[name + "_strides"] = (0,) * rank if tensor is None else tensor.stride()[-rank:]
        return values

    @cached_property
    def _tables(self) -> dict[str, object]:
        inputs = self.inputs
        return {
            "chunk_table": inputs.chunk_table.data_ptr(),
            "segment_table": inputs.segment_table.data_ptr(),
            "num_chunks": self.num_chunks,
            "num_segments": inputs.segment_table.shape[0],
        }

    def _block(self, block: HeadBlock) -> dict[str, object]:
        inputs = self.inputs
        return {
            "num_heads": inputs.num_heads,
            "num_value_heads": inputs.num_value_heads,
            "first_head": block.first,
            "num_block_heads": block.count,
        }

    @cached_property
    def _gate(self) -> dict[str, object]:
        inputs, transforms = self.inputs, self.transforms
        return {
            "A_log": address(inputs.A_log),
            "dt_bias": address(inputs.dt_bias),
            "g_dtype": DTYPE_CODES[DTYPE_NAMES[inputs.g.dtype]],
            "gate_form": GATE_FORMS[transforms.gate_form],
            "lower_bound": transforms.lower_bound or 0.0,
        }

    @cached_property
    def _beta(self) -> dict[str, object]:
        return {
            "beta_dtype": DTYPE_CODES[DTYPE_NAMES[self.inputs.beta.dtype]],
            "beta_form": BETA_FORMS[self.transforms.beta_form],
        }
