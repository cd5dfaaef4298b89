"""The reference pages, made from the code: docs/reference-api.md, -cli, -records and -errors.

Run ``python -m tests.docs.reference --write`` after a change of a signature, a docstring, an option or a record; a test
says so when it is needed. The table of docs/environment.md is printed by ``python -m cake_kda_jit env --markdown``.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path

import cake_kda_jit
from cake_kda_jit import errors, layers, registry
from cake_kda_jit.arch import ARCHES, FAMILIES
from cake_kda_jit.bench.command import MEASUREMENTS
from cake_kda_jit.cli.command import _FORWARDED, _MODULES, VERBS
from cake_kda_jit.demo.settings import make_parser

DOCS = Path(__file__).resolve().parents[2] / "docs"
WIDTH = 118

API_GROUPS = {
    "Operations": ("chunk_kda", "causal_conv1d", "segment_summary", "transfer_walk"),
    "Packs and options": ("make_plan", "Plan", "KdaOptions", "TRANSFER_WALKS"),
    "What ran": ("last_launches", "LaunchRecord"),
    "Kernels": ("registry", "Registry", "Record", "render", "RenderedSource", "build", "Artifact", "load", "prebuild"),
}
REST = "Context parallelism"
"""The group of every public name that is neither above nor an exception."""


def markdown(docstring: str) -> str:
    """Return a docstring as Markdown: its paragraphs, with literals in single backticks."""
    return inspect.cleandoc(docstring).replace("``", "`")


def wrapped(text: str, width: int = WIDTH) -> str:
    """Return text with its lines broken at spaces."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = (" | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in row) for row in rows)
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {line} |" for line in lines)])


# ---- API ----


def shown(annotation: object) -> str:
    """Return an annotation or a default as it stands in the source, without module names."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:torch|cake_kda_jit|typing|collections)\.(?:[a-z_]+\.)*", "", text)


def signature_of(name: str, function: Callable, *, skip_self: bool = False) -> str:
    """Return a call as code, one parameter a line where it is long."""
    found = inspect.signature(function)
    parameters = list(found.parameters.values())[1 if skip_self else 0 :]
    parts, is_star_said = [], False
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not is_star_said:
            parts.append("*")
            is_star_said = True
        prefix = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        is_star_said |= prefix == "*"
        annotation = "" if one.annotation is one.empty else f": {shown(one.annotation)}"
        default = "" if one.default is one.empty else f" = {one.default!r}" if annotation else f"={one.default!r}"
        parts.append(f"{prefix}{one.name}{annotation}{default}")
    result = "" if found.return_annotation in (found.empty, "None", None) else f" -> {shown(found.return_annotation)}"
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def one_line(call: str) -> str:
    """Return a call that was broken over lines on one."""
    return re.sub(r"\s+", " ", call).replace("( ", "(").replace(", )", ")")


def class_section(kind: type) -> list[str]:
    """Return the parts of a class: how one is made, what it is, its fields, properties and methods."""
    is_record = dataclasses.is_dataclass(kind)
    parts = [markdown(kind.__doc__ or "")]
    if not is_record and "__init__" in vars(kind):
        parts.insert(0, code(signature_of(kind.__name__, kind.__init__, skip_self=True)))
    fields = [f for f in dataclasses.fields(kind) if not f.name.startswith("_")] if is_record else []
    rows = [(f"`{f.name}`", f"`{shown(f.type)}`") for f in fields]
    for member, value in vars(kind).items():
        if member.startswith("_") or member in {f.name for f in fields}:
            continue
        function = getattr(value, "__func__", value)
        first = markdown(value.__doc__ or "").partition("\n\n")[0]
        if first.startswith("See "):  # an override, described where it is declared: no member that a user calls
            continue
        if first.startswith("Alias for field"):
            first = f"`{shown(kind.__annotations__[member])}`"
        if inspect.isfunction(function):
            call = signature_of(member, function, skip_self=not isinstance(value, staticmethod))
            rows.append((f"`{one_line(call)}`", first))
        elif hasattr(value, "__get__"):  # a property, cached or not
            rows.append((f"`{member}`", first))
    return [*parts, table(("member", "what it is"), rows)] if rows else parts


def code(text: str) -> str:
    """Return a block of code that is shown, not run."""
    return f"```text\n{text}\n```"


def api_section(name: str, home: object) -> str:
    """Return the section of one public name."""
    value = getattr(home, name)
    if inspect.isclass(value):
        parts = class_section(value)
    elif callable(value):
        parts = [code(signature_of(name, value)), markdown(value.__doc__ or "")]
    else:
        parts = [f"`{value!r}`"]
    return "\n\n".join([f"### {name}", *parts])


def api_page() -> str:
    """Return docs/reference-api.md."""
    exceptions = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    named = {name for names in API_GROUPS.values() for name in names}
    groups = {**API_GROUPS, REST: sorted(set(cake_kda_jit.__all__) - exceptions - named)}
    parts = [
        "# API",
        "Every public name: its signature, shapes, dtypes and errors, as its docstring has them.",
        wrapped(
            "All but the modules of the last section are imported from `cake_kda_jit`. Exceptions stand in "
            "[Errors](reference-errors.md). What is not named here may change without notice."
        ),
    ]
    for group, names in groups.items():
        parts += [f"## {group}", *(api_section(name, cake_kda_jit) for name in names)]
    parts += ["## Layers", "From `cake_kda_jit.layers`.", *(api_section(name, layers) for name in layers.__all__)]
    return "\n\n".join(parts) + "\n"


# ---- command line ----


def options_table(parser: argparse.ArgumentParser) -> str:
    """Return the arguments of a parser, without ``--help``."""
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.dest}`"
        accepts = ", ".join(map(str, action.choices)) if action.choices else action.metavar or ""
        if not accepts and action.nargs != 0:
            accepts = {int: "a number", float: "a number"}.get(action.type, "text")
        if action.nargs in ("+", "*"):
            accepts = f"one or more of {accepts}" if action.choices else f"{accepts}, several"
        rows.append((names, str(accepts) or "-", action.help or ""))
    return table(("argument", "accepts", "what it does"), rows)


def cli_page() -> str:
    """Return docs/reference-cli.md."""
    parts = [
        "# Verbs and options",
        "Every verb of `python -m cake_kda_jit` with its arguments, as `--help` prints them.",
        "[Command line](command-line.md) shows them at work. Exit codes: 0 done, 1 failed, 2 wrong use.",
    ]
    for verb, summary in VERBS.items():
        parts += [f"## {verb}", wrapped(f"{summary[0].upper()}{summary[1:]}.")]
        if verb == "bench":
            rows = [(f"`{name}`", what) for name, what in MEASUREMENTS.items()]
            parts += ["`bench NAME --help` has the options of a measurement.", table(("measurement", "what"), rows)]
            continue
        if verb in _FORWARDED:
            parser = make_parser()
        else:
            parser = argparse.ArgumentParser()
            import_module(f"cake_kda_jit.cli.{_MODULES.get(verb, verb)}").add_arguments(parser)
        parts.append(options_table(parser))
    return "\n\n".join(parts) + "\n"


# ---- records ----


def records_page() -> str:
    """Return docs/reference-records.md."""
    parts = [
        "# Records",
        "Every kernel: its program, variant, family, constants and targets.",
        wrapped(
            "`python -m cake_kda_jit list` prints the same with what is built. A shipped record may be selected; a "
            "test-only one runs when an argument or the environment names it. Constants are what a template sees "
            "beside the target."
        ),
    ]
    cuda = [arch.name for arch in ARCHES.values() if arch.is_cuda]
    for program in registry().programs:
        parts += [f"## {program.name}", wrapped(f"{program.summary.rstrip('.')}.")]
        if program.bytes_note:
            parts.append(wrapped(f"Memory traffic: {program.bytes_note.rstrip('.')}."))
        rows = []
        for record in sorted(program.records, key=lambda r: (FAMILIES.index(r.family), not r.shipped, r.variant)):
            targets = "every CUDA target" if list(record.archs) == cuda else ", ".join(record.archs)
            constants = ", ".join(f"{name} {value}" for name, value in record.params)
            state = "shipped" if record.shipped else "test-only"
            rows.append((f"`{record.variant}`", record.family, state, constants or "-", targets))
        parts.append(table(("variant", "family", "state", "constants", "targets"), rows))
    return "\n\n".join(parts) + "\n"


# ---- errors ----


def errors_page() -> str:
    """Return docs/reference-errors.md."""
    kinds = [value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__]
    rows = []
    for kind in kinds:
        depth = len([base for base in kind.__mro__ if base in kinds]) - 1
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        rows.append((f"{'· ' * depth}`{kind.__name__}`", bases, markdown(kind.__doc__).partition("\n\n")[0]))
    parts = [
        "# Errors",
        "Every exception that the package raises, by what it is a kind of.",
        "[Debugging](debugging.md) says when each comes, what its message holds and what to do.",
        table(("exception", "is a", "what it means"), rows),
        "## BuildError",
        markdown(errors.BuildError.__doc__),
        wrapped(
            "A message prints those parts in the order `cause`, `first_error`, `hint`, `log`, `reproduction`, each on "
            "a line of its own."
        ),
    ]
    return "\n\n".join(parts) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "reference-api.md": api_page,
    "reference-cli.md": cli_page,
    "reference-records.md": records_page,
    "reference-errors.md": errors_page,
}


def outdated() -> list[str]:
    """Return the names of the pages that differ from the code."""
    return [
        name
        for name, make in PAGES.items()
        if not (DOCS / name).exists() or (DOCS / name).read_text(encoding="utf-8") != make()
    ]


def main(argv: Sequence[str]) -> int:
    """Write what is not current, or list it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args(argv)
    found = outdated()
    for name in found:
        if arguments.write:
            (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"wrote {name}" if arguments.write else f"{name} is not current")
    return 1 if found and not arguments.write else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
