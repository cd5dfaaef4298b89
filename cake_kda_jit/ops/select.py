"""The only place that chooses a record, and it says why. Choices depend on shapes and device, never on timing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .. import config
from ..arch import get_arch
from ..catalog import registry
from ..errors import UnsupportedProblemError
from ..programs.transfer_walk import PRECISION_MODES, SM90_WIDTHS
from ..record import Record
from .problem import AttentionProblem, ConvProblem, NormProblem


@dataclass(frozen=True)
class Selection:
    """A chosen record and the reason, in one line."""

    record: Record
    reason: str


def _families(arch: str, family: str | None) -> tuple[str, ...]:
    available = get_arch(arch).families
    if family is None:
        return available
    if family not in available:
        raise UnsupportedProblemError(f"family {family!r} cannot run on {arch}; it has {', '.join(available)}")
    return (family,)


@cache
def _find_record(program: str, variant: str, family: str) -> Record | None:
    for record in registry().records():
        if (record.program, record.variant, record.family) == (program, variant, family):
            return record
    return None


@cache
def _select(program: str, variant: str, arch: str, family: str | None, why: str) -> Selection:
    families = _families(arch, family)
    for candidate in families:
        record = _find_record(program, variant, candidate)
        if record is not None and record.shipped and arch in record.archs:
            chosen = "forced" if family else f"the best family of {arch} that has it"
            return Selection(record, f"{why}; {candidate} is {chosen}")
    raise UnsupportedProblemError(
        f"no shipped record of {program} solves {variant} on {arch} (families {', '.join(families)}); "
        f"there are: {_offers(program)}"
    )


def _offers(program: str) -> str:
    return ", ".join(record.name for record in registry().shipped() if record.program == program) or "none"


def select_attention(program: str, problem: AttentionProblem, family: str | None) -> Selection:
    """Return the record of a chunk program for a problem; raises UnsupportedProblemError with what there is."""
    variant = f"{problem.dtype}_k{problem.head_dim}"
    return _select(program, variant, problem.arch, family, f"{problem.dtype}, K = V = {problem.head_dim}")


@dataclass(frozen=True)
class Following:
    """A scan that begins beside the ``chunk_prepare`` of its tiles.

    ``num_ctas``: its CTAs, each of which takes a processor. ``num_ahead``: tiles that are begun before CTAs of
    ``chunk_prepare`` leave processors to them. ``from_last``: it wants the last chunk first.
    """

    num_ctas: int
    num_ahead: int
    from_last: bool = False


@dataclass(frozen=True)
class ScanSizes:
    """What decides whether a scan begins beside: of its pack, its block of heads and its device.

    ``processors``: streaming multiprocessors.
    """

    num_segments: int
    num_chunks: int
    num_block_heads: int
    processors: int


SCAN_WALKS = {"chunk_scan": 90, "chunk_scan, kept": 130, "grad_scan": 130}
"""A scan of n CTAs takes these / n of the time in which all processors prepare its tiles: measured beside on an H200.

*kept*: h and v' are.
"""


def select_following(problem: AttentionProblem, family: str | None, scan: str, sizes: ScanSizes) -> Following | None:
    """Return how a scan, of ``SCAN_WALKS``, begins beside its ``chunk_prepare``; None where it gains nothing.

    It changes no bit. Tiles are made in the order of the pack, or backwards: some of several segments would wait long.
    More CTAs than half of the processors would leave too few that prepare, and there must be more to prepare than is
    begun at once.
    """
    program = scan.partition(",")[0]
    for needed in ("chunk_prepare", program):
        if select_attention(needed, problem, family).record.family != "sm90":
            return None
    num_ctas = sizes.num_block_heads * (problem.head_dim // 64)
    num_tiles = sizes.num_block_heads * sizes.num_chunks
    if sizes.num_segments != 1 or 2 * num_ctas > sizes.processors or num_tiles < 8 * sizes.processors:
        return None
    # The processors that the scan leaves shall keep ahead of it until its end.
    share_ahead = 1 - SCAN_WALKS[scan] / num_ctas * (1 - num_ctas / sizes.processors)
    return Following(num_ctas, max(0, int(share_ahead * num_tiles)), from_last=program == "grad_scan")


def select_plain(program: str, variant: str, arch: str, family: str | None) -> Selection:
    """Return the record of a program that has one variant for every problem."""
    return _select(program, variant, arch, family, "its only variant")


def select_conv(program: str, problem: ConvProblem, family: str | None) -> Selection:
    """Return the record of a convolution program; raises UnsupportedProblemError with what there is."""
    return _select(program, problem.dtype, problem.arch, family, f"x is {problem.dtype}")


def select_norm(program: str, problem: NormProblem, family: str | None) -> Selection:
    """Return the record of a gated norm's program; raises UnsupportedProblemError with what there is."""
    variant = f"{problem.dtype}_k{problem.head_dim}"
    return _select(program, variant, problem.arch, family, f"{problem.dtype}, D = {problem.head_dim}")


@dataclass(frozen=True)
class SegmentRule:
    """How a document is cut: into segments of ``segment_tokens`` (0: never) from ``minimum_tokens`` on.

    Where those were more than ``most_segments`` (0: any number) each is as often twice as long as it takes.
    """

    segment_tokens: int
    minimum_tokens: int
    most_segments: int = 0

    def tokens_of(self, length: int) -> int:
        """Return the tokens of a segment of a document of ``length`` tokens: all where it is not cut."""
        if self.segment_tokens == 0 or length < self.minimum_tokens:
            return max(length, 1)
        tokens = self.segment_tokens
        while self.most_segments and length > self.most_segments * tokens:
            tokens *= 2
        return tokens

    def num_segments(self, length: int) -> int:
        """Return the segments of a document of ``length`` tokens; an empty one has one."""
        return max(1, -(-length // self.tokens_of(length)))


def segment_rule(num_value_heads: int, head_dim: int) -> SegmentRule:
    """Return the rule for a number of heads: segments where heads alone leave processors idle.

    It depends on HV and V, and its use on each document's own length, so neighbours in a pack change no bits. From 64
    value blocks of 64 columns on, one long document is served sooner by a plain scan than by summaries and a scan, and
    below that a document shorter than 8,192 tokens is. More than two chains for each of 128 processors would only make
    the walk over the segments longer, which is serial.
    """
    parts = num_value_heads * (head_dim // 64)
    return SegmentRule(0, 0) if parts >= 64 else SegmentRule(2048, 8192, 256 // parts)


DEFAULT_WALK = "default"
"""Names the walk that is taken where nobody names one, also beside an environment that does."""


def named_walk(variant: str | None, precision_mode: int) -> str:
    """Return the name that an argument gives the transfer walk, else the environment, else ``DEFAULT_WALK``.

    ``precision_mode`` 1 or 2 implies tf32_hilo when no walk is named.
    """
    if type(precision_mode) is not int or precision_mode not in range(len(PRECISION_MODES)):
        raise UnsupportedProblemError(f"precision_mode={precision_mode!r}; use 0, 1 (three_mma) or 2 (plain_tf32)")
    if variant is None and config.is_set("TRANSFER_WALK"):
        variant = config.read("TRANSFER_WALK")
    if variant is None:
        return "tf32_hilo" if precision_mode else DEFAULT_WALK
    if not isinstance(variant, str) or variant not in (*config.TRANSFER_WALKS, DEFAULT_WALK):
        raise UnsupportedProblemError(
            f"transfer walk {variant!r}; use one of {', '.join(config.TRANSFER_WALKS)}, or {DEFAULT_WALK}"
        )
    return variant


def resolve_walk(variant: str | None, precision_mode: int) -> str:
    """Return the transfer walk's variant from the two knobs, a ``precision_mode`` beside a bf16x3 walk refused."""
    name = named_walk(variant, precision_mode)
    walk = config.TRANSFER_WALKS[0] if name == DEFAULT_WALK else name
    if precision_mode and walk != "tf32_hilo":
        raise UnsupportedProblemError(
            f"precision_mode={precision_mode} belongs to tf32_hilo, not to {walk!r}; leave one of the two out"
        )
    return PRECISION_MODES[precision_mode] if walk == "tf32_hilo" else walk


SM90_PROCESSORS = 132
"""Streaming multiprocessors of an H100 or H200: what the width of the sm90 walk is chosen for. It changes no bit."""


def walk_width(num_walks: int, head_dim: int) -> int:
    """Return the value columns per CTA of the sm90 walk: the fewest whose CTAs all run at once, else all of them.

    ``num_walks`` is chains times heads. A walk is serial, so narrower CTAs end it sooner as long as none waits for a
    processor; once some wait, wider ones split M less often.
    """
    for width in SM90_WIDTHS:
        if num_walks * (head_dim // width) <= SM90_PROCESSORS or width >= head_dim:
            return width
    return max(SM90_WIDTHS)


def select_walk(
    arch: str, variant: str | None, precision_mode: int, family: str | None = None, *, num_walks: int, head_dim: int
) -> Selection:
    """Return the transfer walk's record: the default, or the one that an argument or the environment names.

    Where no width is named, by default and for tf32_hilo, the family that has several takes the one that fits
    ``num_walks``, chains times heads.
    """
    walk = resolve_walk(variant, precision_mode)
    if variant == DEFAULT_WALK:
        source = "default"
    elif variant is not None or precision_mode:
        source = "argument"
    else:
        source = "environment" if config.is_set("TRANSFER_WALK") else "default"
    for candidate in _families(arch, family):
        name, reason = walk, f"{walk} by {source}"
        if candidate == "sm90" and source == "default":
            name = SM90_WIDTHS[walk_width(num_walks, head_dim)]
            reason = f"{name} by default for {num_walks} walks of width {head_dim}"
        elif candidate == "sm90" and walk in PRECISION_MODES:
            name = f"{walk}_hw64" if num_walks * (head_dim // 64) <= SM90_PROCESSORS else walk
            reason = f"{name} by {source} for {num_walks} walks of width {head_dim}"
        record = _find_record("transfer_walk", name, candidate)
        if record is not None and arch in record.archs:
            return Selection(record, reason)
    raise UnsupportedProblemError(
        f"no record of transfer_walk {walk} for {arch}; there are: {_offers('transfer_walk')}"
    )
