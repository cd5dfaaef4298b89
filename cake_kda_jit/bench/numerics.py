"""The tables of docs/numerics.md, made from the files of errors and of comparisons in docs/measurements.

``bench performance --write`` puts them there. A table stands between ``<!-- table of FILE: written by `bench
performance` -->`` and ``<!-- /table -->``; all else is left alone.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from ..errors import ConfigError
from . import determinism, precision, walk_precision

WRITERS = {module.__name__.rpartition(".")[2]: module.text_of for module in (determinism, precision, walk_precision)}
"""Who shows the files of which script."""
_BLOCK = re.compile(r"(<!-- table of (\S+): written by `bench performance` -->\n).*?(<!-- /table -->)", re.DOTALL)


def with_tables(text: str, directory: Path) -> str:
    """Return the page with every table as its file has it; raises ConfigError for a file that has none."""

    def block(match: re.Match[str]) -> str:
        path = directory / match.group(2)
        if not path.is_file():
            raise ConfigError(f"docs/numerics.md has a table of {path}, which is not there; measure it or take it out")
        report = json.loads(path.read_text(encoding="utf-8"))
        script = re.split(r"[ .]", report["script"])[-1]
        if script not in WRITERS:
            raise ConfigError(f"{path} was written by {script!r}; tables are made of files of {', '.join(WRITERS)}")
        what, table = WRITERS[script](report).split("\n\n", 1)
        return f"{match.group(1)}\n{textwrap.fill(what, 118)}\n\n{table}\n{match.group(3)}"

    return _BLOCK.sub(block, text)
