"""Run in a fresh process: build the tiny kernel and print what happened as one JSON line."""

from __future__ import annotations

import importlib.metadata  # noqa: F401  torch, which every real process has imported, has loaded it too
import json
import sys
import time
from pathlib import Path

from cake_kda_jit import errors, paths
from cake_kda_jit.compiler.build import build

from .tiny import HOST_ARCH, tiny_record


def report(artifact, began: float) -> dict[str, object]:
    """What one build gave."""
    return {
        "origin": artifact.origin,
        "library": str(artifact.library),
        "sha256": artifact.sha256,
        "build_key": artifact.build_key,
        "source_key": artifact.source_key,
        "milliseconds": 1e3 * (time.perf_counter() - began),
        "loaded": [name for name in ("jinja2", "ninja", "filelock", "torch") if name in sys.modules],
    }


def fork_first() -> dict[str, object]:
    """Import, fork, build in the child."""
    import cake_kda_jit

    from .forked import Forked, built

    cake_kda_jit.registry()
    before = "torch" in sys.modules
    child = Forked(lambda: built(build(tiny_record(), HOST_ARCH))).result()
    return {"torch_before_fork": before, "child": child["value"]["origin"]}


def main() -> None:
    """Build ``tiny`` in the variants named after the data directory, or in its usual one."""
    data = Path(sys.argv[1])
    paths.data_dir = lambda: data
    if sys.argv[2:] == ["forked"]:
        print(json.dumps(fork_first()))
        return
    began = time.perf_counter()
    try:
        results = [report(build(tiny_record(variant=name), HOST_ARCH), began) for name in sys.argv[2:] or ["fp32"]]
    except errors.CakeKdaError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        return
    print(json.dumps(results[0] if len(results) == 1 else {"results": results}))


main()
