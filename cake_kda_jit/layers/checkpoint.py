"""One attention layer's weights out of a published checkpoint, under the names of ``KimiDeltaAttention``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..errors import UnsupportedProblemError

KIMI_LINEAR_PREFIX = "model.layers.{layer}.self_attn."
"""Where a Kimi Linear checkpoint keeps the attention of layer ``{layer}``. Its names are this package's own."""

FLA_NAMES = {
    "f_proj.0": "f_a_proj",
    "f_proj.1": "f_b_proj",
    "g_proj.0": "g_a_proj",
    "g_proj.1": "g_b_proj",
}
"""What flash-linear-attention's own layer calls otherwise; its ``g_proj.1`` has a bias: ``output_gate_bias=True``."""


def attention_weights(checkpoint: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights below ``prefix`` under the names of ``KimiDeltaAttention``, for its ``load_state_dict``.

    ``A_log`` of any shape with HV values becomes ``[HV]``, and ``A_log`` and ``dt_bias`` fp32; all else is passed on as
    it is, dtype included. Takes the names of Kimi Linear and of flash-linear-attention's layer.

    Raises UnsupportedProblemError if nothing stands below the prefix.
    """
    weights = {}
    for key, tensor in checkpoint.items():
        if not key.startswith(prefix):
            continue
        module, dot, parameter = key.removeprefix(prefix).rpartition(".")
        name = f"{FLA_NAMES.get(module, module)}{dot}{parameter}"
        if name in ("A_log", "dt_bias"):
            tensor = tensor.flatten().float()
        weights[name] = tensor
    if not weights:
        near = ", ".join(sorted({key.rpartition(".")[0] for key in checkpoint})[:5]) or "nothing"
        raise UnsupportedProblemError(f"the checkpoint has no weight below {prefix!r}; it begins with {near}")
    return weights
