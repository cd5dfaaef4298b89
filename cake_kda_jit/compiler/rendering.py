"""Render for a build, together with what the rendering read: enough to tell later that it would give the same again.

The list of templates and their digests decide whether a hit may be used without rendering, so they must belong to the
very text: renderings of several threads take turns, and a template that is edited meanwhile is noticed.
"""

from __future__ import annotations

import hashlib
import os
import threading
from functools import cache
from pathlib import Path
from typing import Any

from .. import paths
from ..arch import Arch
from ..codegen.render import RenderedSource, render
from ..errors import RenderError
from ..record import Record
from .key import digest, file_digest

# The rendered text and the list of what it was made from depend on these modules beside the templates.
_RENDERING_CODE = ("arch.py", "record.py", "codegen/environment.py", "codegen/render.py", "compiler/rendering.py")
_ATTEMPTS = 3

_turn = threading.Lock()


def render_for_build(record: Record, arch: str | Arch) -> tuple[RenderedSource, dict[str, Any]]:
    """Return a record's source and its inputs: digests of the templates read, of our code, and of the text.

    Raises RenderError if the templates do not hold still.
    """
    with _turn:
        for _ in range(_ATTEMPTS):
            source = render(record, arch)
            inputs = _inputs(source)
            again = render(record, arch)
            if inputs is not None and (again.digest, again.templates) == (source.digest, source.templates):
                return source, inputs
    raise RenderError(f"the templates of {record.name} change while they are read", hint="call again")


def _inputs(source: RenderedSource) -> dict[str, Any] | None:
    root = paths.templates_dir()
    try:
        templates = {name: file_digest(root / name) for name in source.templates}
    except OSError:  # removed since it was rendered
        return None
    return {"code": rendering_code_digest(), "templates": templates, "source_digest": source.digest}


@cache
def rendering_code_digest() -> str:
    """Return the digest of this package's code that decides a rendered text."""
    return digest([file_digest(paths.PACKAGE_DIR / name) for name in _RENDERING_CODE])


def is_current(inputs: dict[str, Any]) -> bool:
    """Whether the code and the templates are still those of a rendering."""
    if inputs["code"] != rendering_code_digest():
        return False
    root = paths.templates_dir()
    try:
        return all(_small_digest(root / name) == known for name, known in inputs["templates"].items())
    except OSError:
        return False


def _small_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _reset_after_fork() -> None:
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
