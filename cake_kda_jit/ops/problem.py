"""What is asked of a kernel, in shapes and options: no tensors, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from .. import config
from ..errors import UnsupportedProblemError

CHUNK_TOKENS = 64


@dataclass(frozen=True)
class AttentionProblem:
    """One attention call: where it runs and what a record's constants must match.

    ``arch`` is the target's name, ``dtype`` the dtype of q, k, v (bf16, fp16, fp32), ``head_dim`` K = V.
    """

    arch: str
    dtype: str
    num_heads: int
    num_value_heads: int
    head_dim: int


@dataclass(frozen=True)
class ConvProblem:
    """One convolution call. ``dtype`` is the dtype of x."""

    arch: str
    dtype: str
    num_channels: int
    width: int


@dataclass(frozen=True)
class KdaOptions:
    """How to compute, never what: options change memory and time, not results.

    ``backward``: "saved" keeps the state entering every chunk, "replay" computes it again in the backward; both give
    the same bits. ``checkpoint_tokens``: tokens between two kept states in replay. ``workspace_limit``: most bytes of
    scratch; None: 6.4 GB for saved, 3.2 GB for replay. ``family``: force cpu, smxx or sm90. None takes
    CAKE_KDA_JIT_*, then the default.
    """

    backward: str | None = None
    checkpoint_tokens: int | None = None
    workspace_limit: int | None = None
    family: str | None = None

    def resolved(self) -> KdaOptions:
        """Return the options with every knob decided: argument, environment, default. Raises on a bad value."""
        backward = config.resolve("BACKWARD", self.backward)
        if backward not in config.BACKWARDS:
            raise UnsupportedProblemError(f"backward={backward!r}; use one of {config.BACKWARDS}")
        tokens = config.resolve("CHECKPOINT_TOKENS", self.checkpoint_tokens)
        for name, value in (("checkpoint_tokens", tokens), ("workspace_limit", self.workspace_limit)):
            if value is not None and not isinstance(value, int):
                raise UnsupportedProblemError(f"{name}={value!r}; give an integer")
        if tokens < CHUNK_TOKENS or tokens % CHUNK_TOKENS:
            raise UnsupportedProblemError(f"checkpoint_tokens={tokens}; use a positive multiple of {CHUNK_TOKENS}")
        if self.workspace_limit is not None and self.workspace_limit < 1:
            raise UnsupportedProblemError(f"workspace_limit={self.workspace_limit}; use a number of bytes or None")
        family = config.resolve("FAMILY", self.family)
        if family is not None and family not in config.FAMILY_CHOICES:
            raise UnsupportedProblemError(f"family={family!r}; use one of {config.FAMILY_CHOICES} or None")
        return KdaOptions(backward, tokens, self.workspace_limit, family)


_DEFAULT_OPTIONS = KdaOptions()


def resolve_options(options: KdaOptions | None) -> KdaOptions:
    """Return the options of a call with every knob decided; raises on what is no KdaOptions, or has more than they."""
    if options is not None and type(options) is not KdaOptions:
        raise UnsupportedProblemError(
            f"options is {type(options).__name__}; give KdaOptions(...) or None: KcpOptions belong to a KcpContext"
        )
    return (options or _DEFAULT_OPTIONS).resolved()


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """Return the scale, K^-1/2 by default; raises unless fp32 can hold it."""
    value = head_dim**-0.5 if scale is None else float(scale)
    if not abs(value) < 3.4e38:
        raise UnsupportedProblemError(f"scale={scale}; give a finite number that fp32 holds")
    return value
