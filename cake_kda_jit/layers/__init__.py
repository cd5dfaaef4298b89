"""Layers for models: the attention layer of Kimi Linear on this package's kernels."""

from .kimi_delta_attention import KimiDeltaAttention
from .parts import GatedRMSNorm, ShortConvolution

__all__ = ["GatedRMSNorm", "KimiDeltaAttention", "ShortConvolution"]
