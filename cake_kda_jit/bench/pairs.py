"""Every pair of options of chunk_kda at least once: a small covering set of calls, and the table of pairs.

Run ``python -m cake_kda_jit.bench.pairs``; it prints Markdown for docs/numerics.md. The set is the same in every run.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, object]
Pair = tuple[str, object, str, object]

OPTIONS: dict[str, tuple[object, ...]] = {
    "gate": ("ready", "softplus", "bounded", "bounded, no A_log"),
    "dt_bias": (True, False),
    "l2norm": (True, False),
    "beta": ("ready", "sigmoid", "two_sigmoid"),
    "dtype": ("bf16", "fp16", "fp32"),
    "g dtype": ("as q", "fp32"),
    "beta dtype": ("as q", "fp32"),
    "head_dim": (64, 128),
    "group": (1, 2, 4),
    "initial_state": (True, False),
    "final_state": ("no", "output", "output and gradient"),
    "state_v_first": (True, False),
    "layout": ("packed", "batched"),
    "backward": ("saved", "saved and decayed qk", "replay"),
    "checkpoint_tokens": (64, 128, 512),
    "workspace_limit": ("None", "one group"),
    "segment_tokens": ("by rule", 0, 64),
    "scale": ("default", 0.3),
    "strides": ("contiguous", "sliced"),
}


def is_possible(row: Mapping[str, object]) -> bool:
    """Whether the options named in a whole or partial row may stand together."""
    if row.get("gate") == "ready" and row.get("dt_bias"):
        return False  # refused: it would get no gradient
    # A plan, and with it segment_tokens, belongs to a pack.
    return not (row.get("layout") == "batched" and row.get("segment_tokens", "by rule") != "by rule")


def pairs_of(row: Mapping[str, object]) -> set[Pair]:
    """Return the pairs of values in a row, names in the order of the row."""
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(row, 2)}


def all_pairs(
    options: Mapping[str, Sequence[object]], possible: Callable[[Mapping[str, object]], bool]
) -> dict[Pair, None]:
    """Return every possible pair of values of two options, in a fixed order (a dict, for its order)."""
    pairs = {}
    for a, b in itertools.combinations(options, 2):
        for one, other in itertools.product(options[a], options[b]):
            if possible({a: one, b: other}):
                pairs[a, one, b, other] = None
    return pairs


def covering_rows(
    options: Mapping[str, Sequence[object]] = OPTIONS,
    possible: Callable[[Mapping[str, object]], bool] = is_possible,
) -> list[Row]:
    """Return rows, one value per option, that together hold every possible pair of values.

    Greedy and deterministic: each row starts from the first pair that is missing, then every other option takes the
    possible value that adds the most missing pairs, the option with the most to add first.
    """
    missing = all_pairs(options, possible)
    rows = []
    while missing:
        a, one, b, other = next(iter(missing))
        row = {a: one, b: other}
        while len(row) < len(options):
            candidates = [
                (_gain(row, name, value, missing), -index, name, value)
                for index, name in enumerate(options)
                if name not in row
                for value in options[name]
                if possible({**row, name: value})
            ]
            _, _, name, value = max(candidates, key=lambda candidate: candidate[:2])
            row[name] = value
        row = {name: row[name] for name in options}
        for pair in pairs_of(row):
            missing.pop(pair, None)
        rows.append(row)
    return rows


def _gain(row: Row, name: str, value: object, missing: Mapping[Pair, None]) -> int:
    return sum(
        (other, given, name, value) in missing or (name, value, other, given) in missing for other, given in row.items()
    )


def table() -> str:
    """Return Markdown: the number of pairs and calls, each option's values, and each call of the covering set."""
    rows, pairs = covering_rows(), all_pairs(OPTIONS, is_possible)
    covered = set().union(*(pairs_of(row) for row in rows)) & set(pairs)
    product = math.prod(map(len, OPTIONS.values()))
    lines = [
        f"{len(OPTIONS)} options, {product:,} combinations, {len(pairs)} possible pairs of values; {len(rows)} calls "
        f"hold {len(covered)} of them.",
        "",
        "| option | values | pairs with the other options |",
        "|---|---|---|",
    ]
    for name, values in OPTIONS.items():
        count = sum(name in (a, b) for a, _, b, _ in pairs)
        lines.append(f"| {name} | {', '.join(map(str, values))} | {count} |")
    lines += ["", "| call | " + " | ".join(OPTIONS) + " |", "|---" * (len(OPTIONS) + 1) + "|"]
    for index, row in enumerate(rows):
        lines.append(f"| {index} | " + " | ".join(str(value) for value in row.values()) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; there are no options."""
    argparse.ArgumentParser(description=main.__doc__).parse_args(argv)
    print(table(), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
