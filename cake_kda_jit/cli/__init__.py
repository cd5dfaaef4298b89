"""The command line: one module per verb, each with ``add_arguments(parser)`` and ``run(arguments) -> int``.

Exit codes: 0 done, 1 failed, 2 wrong use.
"""

from .command import main

__all__ = ["main"]
