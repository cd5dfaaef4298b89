"""``explain``: which rank would hold which tokens of a pack, and what each fragment needs from other ranks."""

from __future__ import annotations

import argparse

from ..cp.partition import Partition
from ..errors import ConfigError
from .common import add_json, print_json
from .pack_file import ACCEPTED, PackFile, read_pack

_LAYOUTS = ("contiguous", "zigzag", "per_document_zigzag", "balanced", "padded_per_document_zigzag", "custom")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("--layout", required=True, choices=_LAYOUTS, help="how the ranks share the pack")
    parser.add_argument("--ranks", required=True, type=int, metavar="W", help="the number of ranks")
    parser.add_argument("--pack", required=True, metavar="FILE", help=ACCEPTED)
    parser.add_argument("--whole-below", type=int, metavar="N", help="balanced: shorter documents stay whole")
    parser.add_argument("--conv-width", type=int, default=4, help="width of the convolution, for its halo (default 4)")
    parser.add_argument("--heads", type=int, default=32, metavar="HV", help="value heads, for bytes (default 32)")
    parser.add_argument("--head-dim", type=int, default=128, metavar="K", help="K = V, for bytes (default 128)")
    parser.add_argument("--plot", metavar="PATH", help="draw who holds what; .png, .svg or .pdf")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation and draw the picture; runs nothing."""
    for option in ("ranks", "conv_width", "heads", "head_dim"):
        value = getattr(arguments, option)
        if value < 1:
            raise ConfigError(f"--{option.replace('_', '-')} {value} is not valid; accepted: a positive integer")
    if (arguments.whole_below is None) == (arguments.layout == "balanced"):
        raise ConfigError("--whole-below N belongs to --layout balanced, which needs it, and to no other layout")
    partition = _partition(arguments, read_pack(arguments.pack))
    explanation = partition.explain(
        conv_width=arguments.conv_width, num_value_heads=arguments.heads, head_dim=arguments.head_dim
    )
    if arguments.plot:
        partition.plot(arguments.plot)
    if arguments.json:
        print_json(explanation.as_json())
    else:
        print(explanation)
    return 0


def _partition(arguments: argparse.Namespace, pack: PackFile) -> Partition:
    needed = {"padded_per_document_zigzag": "cu_seqlens_padded", "custom": "fragments"}.get(arguments.layout)
    if needed and getattr(pack, needed) is None:
        raise ConfigError(f"--layout {arguments.layout} needs {needed} in {arguments.pack}: give {ACCEPTED}")
    if arguments.layout == "custom":
        return Partition.from_fragments(pack.cu_seqlens, pack.fragments, arguments.ranks)
    if arguments.layout == "padded_per_document_zigzag":
        return Partition.from_padded(pack.cu_seqlens, pack.cu_seqlens_padded, arguments.ranks)
    options = {} if arguments.whole_below is None else {"whole_below": arguments.whole_below}
    return getattr(Partition, arguments.layout)(pack.cu_seqlens, arguments.ranks, **options)
