"""Errors of the published packs on virtual ranks: what walks differ by, and what ranks differ by from one device.

Run ``python -m cake_kda_jit.bench virtual_ranks [--device cuda] [--tokens T] [--json FILE]``; it prints Markdown for
docs/context-parallelism.md, and ``--table FILE`` prints that of a file that was written before.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from ..cp.context import KcpContext
from ..cp.options import KcpOptions
from ..cp.partition import Partition
from ..cp.virtual import VirtualGroup, run_virtual
from ..ops.api import chunk_kda
from ..ops.plan import make_plan
from .core import machine, write_report
from .cp_cases import HEAD_DIM, LAYOUTS, PACKS, RANKS, Sizes
from .problems import NAMES, Problem, relative_error

FORMS = {
    "bf16x3_hw64": {"transfer_walk": "bf16x3_hw64"},
    "bf16x3": {"transfer_walk": "bf16x3"},
    "tf32_hilo": {"transfer_walk": "tf32_hilo"},
    "tf32_hilo_three_mma": {"precision_mode": 1},
    "tf32_hilo_plain_tf32": {"precision_mode": 2},
}
"""Each form of the walk and the options that name it."""
STEP_ERRORS = {
    "bf16x3_hw64": 3.1e-7,
    "bf16x3": 3.1e-7,
    "tf32_hilo": 8e-7,
    "tf32_hilo_three_mma": 8e-7,
    "tf32_hilo_plain_tf32": 3e-4,
}
"""What a form costs a state, as docs/numerics.md has it: relative, and flat in the number of steps if M contracts."""
BF16_UNIT = 2.0**-8
REGIMES = {"softplus": (-3.0, 0.0), "slow": (-14.0, -6.0), "crossing": (-9.0, -3.0)}
"""Shifts of the gate's bias and of beta: what a state is after some thousand tokens.

softplus has forgotten it; slow carries it over all of the pack; crossing takes a part of it over a cut or two.
"""
BENCH_REGIMES = ("softplus", "slow")
PER_TOKEN = ("o", "dq", "dk", "dv", "dg", "dbeta")
STATES = ("final_state", "dinitial_state")
COMPARED = (*PER_TOKEN, *STATES)
HEADS = 2


@dataclass(frozen=True)
class Pack:
    """A problem on its device and the gradients of its outputs. ``problem.cu_seqlens`` is on the CPU."""

    problem: Problem
    do: Tensor
    dfinal_state: Tensor

    @property
    def boundaries(self) -> list[int]:
        """The document boundaries."""
        return self.problem.cu_seqlens.tolist()


def make_pack(
    lengths: Sequence[int],
    *,
    regime: str = "softplus",
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Pack:
    """Return a random problem made on the device, so that a long one takes no time; the same at every call there."""
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(0)
    tokens, documents = sum(lengths), len(lengths)

    def normal(*size: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, device=device, dtype=dtype).normal_(0.0, scale, generator=generator)

    gate, beta = REGIMES[regime]
    q, k, v = (normal(1, tokens, heads, head_dim, dtype=dtype) for _ in range(3))
    inputs = (q, k, v, normal(1, tokens, heads, head_dim, scale=1.5, dtype=dtype), normal(1, tokens, heads) + beta)
    keywords = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "A_log": torch.empty(heads, device=device).uniform_(0.0, 2.0, generator=generator),
        "dt_bias": normal(heads * head_dim, scale=0.5) + gate,
        "initial_state": normal(documents, heads, head_dim, head_dim, scale=0.5),
    }
    problem = Problem(dict(zip(NAMES, inputs)), keywords, torch.tensor([0, *lengths]).cumsum(0))
    state = normal(documents, heads, head_dim, head_dim)
    return Pack(problem, normal(1, tokens, heads, head_dim, dtype=dtype), state)


def run_part(pack: Pack, part=lambda tensor: tensor, **where: object) -> dict[str, Tensor]:
    """Return outputs and gradients of the tokens that ``part`` takes of the pack, under their names."""
    leaves = {
        name: (part(tensor) if name in NAMES else tensor).detach().requires_grad_()
        for name, tensor in pack.problem.leaves().items()
    }
    keywords = pack.problem.keywords | {name: leaf for name, leaf in leaves.items() if name not in NAMES}
    o, final_state = chunk_kda(*(leaves[name] for name in NAMES), output_final_state=True, **keywords, **where)
    gradients = torch.autograd.grad([o, final_state], list(leaves.values()), [part(pack.do), pack.dfinal_state])
    found = {"o": o.detach(), "final_state": final_state.detach()}
    return found | {"d" + name: gradient for name, gradient in zip(leaves, gradients)}


def on_one_device(pack: Pack, **options: object) -> dict[str, Tensor]:
    """Return outputs and gradients of the whole pack, without ranks."""
    _, _, heads, head_dim = pack.problem.inputs["v"].shape
    device = pack.do.device
    plan = make_plan(pack.problem.cu_seqlens, num_heads=heads, head_dim=head_dim, device=device)
    return run_part(pack, plan=plan, **options)


def on_rank(pack: Pack, ctx: KcpContext) -> dict[str, Tensor]:
    """Return outputs and gradients of a rank's part of the pack."""
    return run_part(pack, lambda tensor: ctx.partition.shard(tensor, ctx.rank), cp_context=ctx)


def put_together(partition: Partition, ranks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors of the whole pack: tokens in its order, of states and parameters, which are parts, the sum."""
    whole = {}
    for name in ranks[0]:
        parts = [one[name] for one in ranks]
        whole[name] = partition.unshard(parts) if name in PER_TOKEN else sum(parts)
    return whole


def run_on_ranks(pack: Pack, partition: Partition, **options: object) -> list[dict[str, Tensor]]:
    """Return what ``on_rank`` does for every virtual rank."""
    ctx = KcpContext(partition, VirtualGroup(partition.world_size), options=KcpOptions(**options))
    return run_virtual(ctx, lambda rank, own: on_rank(pack, own)).results


def on_ranks(pack: Pack, partition: Partition, **options: object) -> dict[str, Tensor]:
    """Return outputs and gradients of the whole pack, from those of virtual ranks."""
    return put_together(partition, run_on_ranks(pack, partition, **options))


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative Frobenius difference of every tensor that is one per token or a state."""
    return {name: relative_error(found[name], expected[name].double()) for name in COMPARED}


def allowed_difference(form: str, other: str, name: str, *, is_exact: bool = False) -> float:
    """Return by how much two forms of the walk may let a tensor differ, by what a step of each costs.

    A state differs by up to three times the sum of both where M is nearly the identity: errors of steps add up. A
    gradient has walks of both directions behind it. ``is_exact`` is for programs that keep fp32. Otherwise what differs
    by e is rounded to bf16, to one side or the other, in e / 2^-8 of all cases, which leaves sqrt(e 2^-8): in tiles,
    and for tokens once more in the output. Some tensors are sums over several tiles, hence half as much again.
    """
    ways = 1 if name in ("o", "final_state") else 2
    found = 3 * ways * (STEP_ERRORS[form] + STEP_ERRORS[other])
    if is_exact:
        return found
    for _ in range(2 if name in PER_TOKEN else 1):
        found = (found * BF16_UNIT) ** 0.5
    return 1.5 * found


@dataclass(frozen=True)
class Row:
    """Differences by tensor, the largest of all layouts: of ``form`` from ``other``, a form or "one device"."""

    regime: str
    pack: str
    ranks: int
    form: str
    other: str
    errors: dict[str, float]


def rows_of(pack: Pack, labels: tuple[str, str, int], forms: Sequence[str]) -> list[Row]:
    """Return what the first form differs by from one device, and each other one from the first."""
    alone = on_one_device(pack)
    largest: dict[tuple[str, str], dict[str, float]] = {}
    for layout in LAYOUTS:
        partition = getattr(Partition, layout)(pack.boundaries, labels[2])
        first = on_ranks(pack, partition, **FORMS[forms[0]])
        found = {(forms[0], "one device"): differences(first, alone)}
        for form in forms[1:]:
            found[form, forms[0]] = differences(on_ranks(pack, partition, **FORMS[form]), first)
        for key, errors in found.items():
            before = largest.setdefault(key, dict.fromkeys(errors, 0.0))
            largest[key] = {name: max(error, before[name]) for name, error in errors.items()}
    return [Row(*labels, form, other, errors) for (form, other), errors in largest.items()]


def text_of(report: dict) -> str:
    """Return the table of a report as Markdown, behind a line that says how it was measured.

    Each number is the largest of all packs; 0 is a difference of no bit.
    """
    largest: dict[tuple, dict[str, float]] = {}
    packs: dict[tuple, list[str]] = {}
    for row in report["rows"]:
        key = (row["regime"], row["ranks"], row["form"], row["other"])
        before = largest.setdefault(key, dict.fromkeys(row["errors"], 0.0))
        largest[key] = {name: max(error, before[name]) for name, error in row["errors"].items()}
        packs.setdefault(key, []).append(row["pack"])
    where = f"{report['machine']['device']}, torch {report['machine']['torch']}, {report['date']}"
    lines = [("gates", "packs", "ranks", "walk", "differs from", *COMPARED)]
    lines.append(("---",) * len(lines[0]))
    for (regime, ranks, form, other), errors in largest.items():
        named = packs[regime, ranks, form, other]
        span = named[0] if len(named) == 1 else f"{named[0]} to {named[-1]}"
        cells = [f"{error:.1e}" if error else "0" for error in errors.values()]
        lines.append((regime, span, str(ranks), f"`{form}`", other, *cells))
    return "\n\n".join([f"{report['what']}; {where}.", "\n".join(f"| {' | '.join(line)} |" for line in lines)])


def main(argv: Sequence[str] | None = None) -> int:
    """Compare walks and ranks on the packs and print the table."""
    parser = argparse.ArgumentParser(prog="cake-kda-jit bench virtual_ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--head-dim", type=int, default=HEAD_DIM, choices=(64, 128))
    parser.add_argument("--tokens", type=int, help="scale every pack to so many; default: as published")
    parser.add_argument("--packs", nargs="+", default=list(PACKS), choices=list(PACKS))
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--regimes", nargs="+", default=list(BENCH_REGIMES), choices=list(REGIMES))
    parser.add_argument("--forms", nargs="+", default=["bf16x3_hw64", "tf32_hilo"], choices=list(FORMS))
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--table", type=Path, help="print the table of this file, and measure nothing")
    options = parser.parse_args(argv)
    if options.table:
        print(text_of(json.loads(options.table.read_text(encoding="utf-8"))))
        return 0
    sizes = Sizes(options.heads, options.head_dim, options.tokens)
    device = torch.device(options.device)
    rows = []
    for regime, name in product(options.regimes, options.packs):
        pack = make_pack(sizes.lengths(name), regime=regime, heads=sizes.heads, head_dim=sizes.head_dim, device=device)
        for ranks in options.ranks:
            rows += rows_of(pack, (regime, name, ranks), options.forms)
    tokens = f"{options.tokens} tokens each" if options.tokens else "as published"
    what = f"packs {tokens}, H = HV = {sizes.heads}, K = V = {sizes.head_dim}, bf16; the largest of three layouts"
    report = {"what": what, "machine": machine(device), "date": str(date.today())}
    print(text_of(report | {"rows": [asdict(row) for row in rows]}))
    if options.json:
        write_report(options.json, what, "cake_kda_jit.bench.virtual_ranks", device, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
