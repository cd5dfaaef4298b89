"""One training step in a process of its own: what ``bench first_call`` times.

Run ``python -m cake_kda_jit.bench.first_step STEP DEVICE``; it prints JSON: seconds until torch was imported, until the
device answered, until the first and until the second step had ended, and where each kernel came from.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

HEADS, HEAD_DIM, CONV_WIDTH = 4, 128, 4
BOUNDARIES = (0, 70, 128)
"""Two short documents: without segments, so that a step needs neither segment_summary nor transfer_walk."""


def main(argv: list[str]) -> int:
    """Run the step twice and print what it took."""
    step, device = argv
    began = time.perf_counter()
    import torch

    imported = time.perf_counter()
    torch.zeros(1, device=device)
    answered = time.perf_counter()
    run = STEPS[step](device)
    seconds = []
    for _ in range(2):
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter())
    print(json.dumps({
        "torch": imported - began,
        "device": answered - imported,
        "first": seconds[0] - answered,
        "second": seconds[1] - seconds[0],
        "origins": _origins(),
    }))  # fmt: skip
    return 0


def _origins() -> dict[str, str]:
    from ..runtime.load import loaded_kernels

    return {kernel.record.name: kernel.origin for kernel in loaded_kernels()}


def _training(device: str) -> Callable[[], None]:
    """A step of a layer: convolutions of q, k and v, attention with every transform, and all gradients."""
    import torch

    from .. import causal_conv1d, chunk_kda, make_plan

    tokens, generator = BOUNDARIES[-1], torch.Generator().manual_seed(0)

    def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    channels = HEADS * HEAD_DIM
    inputs = [leaf(1, tokens, channels) for _ in range(3)]
    weights = [leaf(channels, CONV_WIDTH) for _ in range(3)]
    g, beta = leaf(1, tokens, HEADS, HEAD_DIM), leaf(1, tokens, HEADS)
    A_log, dt_bias = leaf(HEADS, dtype=torch.float32), leaf(channels, dtype=torch.float32)
    transforms = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")

    def step() -> None:
        plan = make_plan(torch.tensor(BOUNDARIES), num_heads=HEADS, head_dim=HEAD_DIM, device=device)
        mixed = (causal_conv1d(x, weight, plan=plan)[0] for x, weight in zip(inputs, weights))
        q, k, v = (x.view(1, tokens, HEADS, HEAD_DIM) for x in mixed)
        options = dict.fromkeys(transforms, True)
        o, _ = chunk_kda(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, plan=plan, **options)
        o.float().square().mean().backward()

    return step


def _conv(device: str) -> Callable[[], None]:
    """The convolution alone, and its gradients: two kernels."""
    import torch

    from .. import causal_conv1d

    x, weight = (torch.randn(shape).to(device, torch.bfloat16).requires_grad_() for shape in ((1, 64, 64), (64, 4)))

    def step() -> None:
        causal_conv1d(x, weight)[0].float().square().mean().backward()

    return step


STEPS = {"training": _training, "conv": _conv}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
