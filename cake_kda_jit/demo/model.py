"""A byte-level language model of the smallest useful kind: embedding, blocks of attention and MLP, logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..layers import KimiDeltaAttention

NUM_BYTES = 256


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, inner_size, bias=False)
        self.up = nn.Linear(hidden_size, inner_size, bias=False)
        self.down = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x ``[..., hidden_size]`` to the same shape."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden_size)
        # fp32 parameters and matrix products, bf16 on the kernels: what mixed-precision training does.
        self.attention = KimiDeltaAttention(hidden_size, num_heads, head_dim, kernel_dtype=torch.bfloat16)
        self.mlp_norm = nn.RMSNorm(hidden_size)
        self.mlp = SwiGLU(hidden_size, 2 * hidden_size)

    def forward(self, x: Tensor, documents: dict[str, object]) -> Tensor:
        """Map x ``[1, T, hidden_size]`` to the same shape, each document for itself."""
        x = x + self.attention(self.attention_norm(x), **documents)
        return x + self.mlp(self.mlp_norm(x))


class ByteLanguageModel(nn.Module):
    """Logits of the next byte, from the bytes of the same document so far. No positions: the recurrence knows order."""

    def __init__(self, hidden_size: int, num_layers: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads, head_dim) for _ in range(num_layers))
        self.norm = nn.RMSNorm(hidden_size)
        self.logits = nn.Linear(hidden_size, NUM_BYTES, bias=False)
        # All bytes start equally likely: the first loss is ln 256 = 5.55 nats.
        nn.init.zeros_(self.logits.weight)

    def forward(self, tokens: Tensor, documents: dict[str, object]) -> Tensor:
        """Map bytes ``[1, T]`` to logits ``[1, T, 256]``.

        ``documents`` are arguments of the attention, the same for every layer: a plan and options, or a cp_context.
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, documents)
        return self.logits(self.norm(x))
