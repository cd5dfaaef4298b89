"""Layers for models: the attention layer of Kimi Linear on this package's kernels."""

from .checkpoint import FLA_NAMES, KIMI_LINEAR_PREFIX, attention_weights
from .kimi_delta_attention import KimiDeltaAttention
from .parts import GatedRMSNorm, ShortConvolution

__all__ = [
    "FLA_NAMES",
    "GatedRMSNorm",
    "KIMI_LINEAR_PREFIX",
    "KimiDeltaAttention",
    "ShortConvolution",
    "attention_weights",
]
