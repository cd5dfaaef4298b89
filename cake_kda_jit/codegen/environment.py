"""The one Jinja environment: strict, cached, and the only module that imports jinja2."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path

import jinja2

from ..errors import RenderError
from ..paths import templates_dir

CONTEXT_LINES = 3


class RecordingLoader(jinja2.FileSystemLoader):
    """A file loader that can list what one rendering read: the template and everything it includes or imports.

    The list is each thread's own, because records are rendered in several threads at once.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self._local = threading.local()

    def start(self) -> set[str]:
        """Begin a new list for this thread and return it."""
        self._local.read = set()
        return self._local.read

    def get_source(self, environment: jinja2.Environment, template: str):
        """Read a template and note its name."""
        self._local.read.add(template)
        return super().get_source(environment, template)


@cache
def _environment(root: Path) -> jinja2.Environment:
    # StrictUndefined: with the default, a misspelt name renders as nothing and a test on it silently takes "else".
    # cache_size 0: each rendering must list every file that it reads.
    return jinja2.Environment(
        loader=RecordingLoader(root),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        cache_size=0,
    )


def render_template(template: str, context: dict[str, object]) -> tuple[str, tuple[str, ...]]:
    """Render one template; returns the text and the names of the files read, sorted.

    Raises RenderError that shows the template's own lines around the fault.
    """
    environment = _environment(templates_dir())
    read = environment.loader.start()
    try:
        text = environment.get_template(template).render(context)
    except jinja2.TemplateSyntaxError as error:
        raise _render_error(template, error, error.name or template, error.lineno) from error
    except jinja2.TemplateNotFound as error:
        raise RenderError(f"{template}: template {error.name!r} does not exist", hint="see templates/") from error
    except jinja2.UndefinedError as error:
        name, line = _fault_of_traceback(error)
        raise _render_error(template, error, name or template, line) from error
    return text, tuple(sorted(read))


def _fault_of_traceback(error: BaseException) -> tuple[str | None, int]:
    """Return the innermost template file and line in a traceback: jinja2 rewrites frames to template lines."""
    name, line, trace = None, 0, error.__traceback__
    root = str(templates_dir())
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if filename.startswith(root):
            name, line = str(Path(filename).relative_to(root)), trace.tb_lineno
        trace = trace.tb_next
    return name, line


def _render_error(template: str, error: Exception, where: str, line: int) -> RenderError:
    lines = (templates_dir() / where).read_text(encoding="utf-8").splitlines()
    first, last = max(0, line - 1 - CONTEXT_LINES), min(len(lines), line + CONTEXT_LINES)
    shown = "\n".join(f"  {'>' if n + 1 == line else ' '} {n + 1:4d} | {lines[n]}" for n in range(first, last))
    return RenderError(
        f"{template}: {error} ({where}, line {line})\n{shown}",
        hint="names come from the record's params and from host/args.jinja",
    )
