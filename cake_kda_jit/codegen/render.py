"""Render a record for a target: deterministic text whose digest is its identity."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from ..arch import Arch, get_arch
from ..errors import UnsupportedArch
from ..record import Record

DIGEST_LENGTH = 12


@dataclass(frozen=True)
class RenderedSource:
    """Source text of one record for one target.

    ``digest`` is the sha256 of ``text`` in hex; ``templates`` are the template files read, relative to ``templates/``.
    """

    record: Record
    arch: str
    text: str
    digest: str
    templates: tuple[str, ...]

    @property
    def filename(self) -> str:
        """``<program>__<variant>.<digest12>.cu`` or ``.cpp``."""
        return f"{self.record.symbol}.{self.digest[:DIGEST_LENGTH]}{self.record.suffix}"


def check_arch(record: Record, arch: Arch) -> None:
    """Raise UnsupportedArch unless the record builds for the target."""
    if arch.name not in record.archs:
        raise UnsupportedArch(
            f"{record.name} is not built for {arch.name}", hint=f"it builds for {', '.join(record.archs)}"
        )


def render(record: Record, arch: str | Arch) -> RenderedSource:
    """Render a record's template for a target.

    Two calls give the same bytes, in any process and any working directory. Raises UnsupportedArch or RenderError.
    """
    from .environment import render_template  # jinja2 is loaded only when something must be rendered

    target = get_arch(arch)
    check_arch(record, target)
    context = {"record": record, "entry": record.entry, "symbol": record.symbol, "arch": target, **record.constants}
    body, templates = render_template(record.template, context)
    text = _provenance(record, target) + body
    digest = hashlib.sha256(text.encode()).hexdigest()
    return RenderedSource(record, target.name, text, digest, templates)


def _provenance(record: Record, arch: Arch) -> str:
    params = json.dumps(record.constants, sort_keys=True)
    return (
        f"// {record.symbol}, family {record.family}, target {arch.name}\n"
        f"// Rendered by cake_kda_jit from templates/{record.template}; edit the template, not this file.\n"
        f"// params: {params}\n"
    )
