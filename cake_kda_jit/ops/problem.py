"""What is asked of a kernel, in shapes and options: no tensors, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
class NormProblem:
    """One gated norm. ``dtype`` is the dtype of x and of the gate."""

    arch: str
    dtype: str
    head_dim: int


@dataclass(frozen=True)
class KdaOptions:
    """How to compute, never what: options change memory and time, not results.

    ``backward``: "saved" keeps the state entering every chunk, "replay" computes it again in the backward; both give
    the same bits. ``checkpoint_tokens``: tokens between two kept states in replay. ``workspace_limit``: most bytes of
    scratch; None: 6.4 GB for saved, 3.2 GB for replay. ``family``: force cpu, smxx or sm90. ``keep_decayed_qk``: saved
    keeps the decayed q and k of every chunk too, which a backward forms again otherwise: less time, 1.6 times the
    memory between the two. None takes CAKE_KDA_JIT_*, then the default. Raises UnsupportedProblemError on a bad value.
    """

    backward: str | None = None
    checkpoint_tokens: int | None = None
    workspace_limit: int | None = None
    family: str | None = None
    keep_decayed_qk: bool = False

    def __post_init__(self) -> None:
        # Not where they are used, which is behind keys that hold options: there 1e9 and True are equal to integers.
        self._check()

    def _check(self) -> None:
        _check_choice("backward", self.backward, config.BACKWARDS)
        _check_choice("family", self.family, config.FAMILY_CHOICES)
        for name in ("checkpoint_tokens", "workspace_limit"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise UnsupportedProblemError(f"{name}={value!r}; give an integer, or None for the default")
        if type(self.keep_decayed_qk) is not bool:
            raise UnsupportedProblemError(f"keep_decayed_qk={self.keep_decayed_qk!r}; use True or False")
        tokens, limit = self.checkpoint_tokens, self.workspace_limit
        if tokens is not None and not (0 < tokens < 2**31 and tokens % CHUNK_TOKENS == 0):
            raise UnsupportedProblemError(
                f"checkpoint_tokens={tokens}; use a positive multiple of {CHUNK_TOKENS} below 2^31"
            )
        if limit is not None and not 0 < limit < 2**63:
            raise UnsupportedProblemError(f"workspace_limit={limit}; use a number of bytes, below 2^63, or None")
        if self.keep_decayed_qk and self.backward == "replay":
            raise UnsupportedProblemError(
                "keep_decayed_qk=True beside backward='replay', which would not use it; set backward='saved', also "
                "where CAKE_KDA_JIT_BACKWARD names replay, or leave keep_decayed_qk out"
            )

    def resolved(self) -> KdaOptions:
        """Return the options with every knob decided: argument, environment, default. Raises as making them does."""
        return replace(
            self,
            backward=config.resolve("BACKWARD", self.backward),
            checkpoint_tokens=config.resolve("CHECKPOINT_TOKENS", self.checkpoint_tokens),
            family=config.resolve("FAMILY", self.family),
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value is not None and not (isinstance(value, str) and value in choices):
        raise UnsupportedProblemError(f"{name}={value!r}; use one of {choices}, or None for the default")


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
