"""``python -m cake_kda_jit.bench NAME``: one measurement, by the name of its module."""

from __future__ import annotations

import sys

from .command import main

sys.exit(main())
