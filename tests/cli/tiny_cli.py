"""Run the command line, in a fresh process, with the tiny kernel as the only record: ``DATA VERB...``."""

from __future__ import annotations

import sys
from pathlib import Path

from cake_kda_jit import paths
from cake_kda_jit.catalog import Registry
from cake_kda_jit.cli import common, list_records, main
from cake_kda_jit.compiler import manifest
from cake_kda_jit.record import Program

from ..compiler.tiny import tiny_record

if __name__ == "__main__":
    data, registry = Path(sys.argv[1]), Registry((Program("tiny", "", (tiny_record(),)),))
    paths.data_dir = lambda: data
    for module in (common, list_records, manifest):
        module.registry = lambda: registry
    sys.exit(main(sys.argv[2:]))
