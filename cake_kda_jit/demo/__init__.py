"""``python -m cake_kda_jit demo``: train a small language model on packed documents, through this package's kernels.

Read `model` for the layers, `training` for the loop (where plans and packs meet the kernels), `packing` for how
documents become packs. `command` is the command line.
"""

from .command import main

__all__ = ["main"]
