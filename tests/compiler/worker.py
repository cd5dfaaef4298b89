"""Run in a fresh process: build the tiny kernel and print what happened as one JSON line."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from cake_kda_jit import errors, paths
from cake_kda_jit.compiler.build import build

from .tiny import HOST_ARCH, tiny_record


def main() -> None:
    data = Path(sys.argv[1])
    paths.data_dir = lambda: data
    record = tiny_record()
    began = time.perf_counter()
    try:
        artifact = build(record, HOST_ARCH)
    except errors.CakeKdaError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        return
    milliseconds = 1e3 * (time.perf_counter() - began)
    loaded = [name for name in ("jinja2", "ninja", "filelock", "torch") if name in sys.modules]
    print(
        json.dumps(
            {
                "origin": artifact.origin,
                "library": str(artifact.library),
                "sha256": artifact.sha256,
                "build_key": artifact.build_key,
                "source_key": artifact.source_key,
                "milliseconds": milliseconds,
                "loaded": loaded,
            }
        )
    )


main()
