"""Command lines, with tokens where paths stand, so that the same build on two machines has the same key."""

from __future__ import annotations

import shlex

from .. import config
from ..arch import Arch
from ..errors import ConfigError
from ..record import Record
from .artifact import library_name
from .request import Request
from .toolchain import Toolchain

DEPFILE = "dependencies.d"


def extra_flags() -> tuple[str, ...]:
    """Return ``CAKE_KDA_JIT_EXTRA_FLAGS``, split as a shell would; raises ConfigError if a quote is not closed."""
    text = config.read("EXTRA_FLAGS")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(
            f"CAKE_KDA_JIT_EXTRA_FLAGS={text!r} is not valid ({error}); accepted: flags, quoted as for a shell"
        ) from None


def compile_flags(record: Record, arch: Arch, toolchain: Toolchain) -> tuple[str, ...]:
    """Return the flags of a record for a target, with tokens such as ``{cxx}`` in place of paths."""
    keywords = record.build_keywords
    defines = tuple(f"-D{name}={value}" for name, value in keywords.defines)
    return (_cuda_flags(record, arch, toolchain) if arch.is_cuda else _cpu_flags(record, arch)) + defines


def _cpu_flags(record: Record, arch: Arch) -> tuple[str, ...]:
    keywords = record.build_keywords
    return (
        "-std=c++17",
        f"-O{keywords.opt_level}",
        # One rounding per operation on every machine: no multiply-add where the source has none.
        "-ffp-contract=off",
        *(("-ffast-math",) if keywords.fast_math else ()),
        *arch.cpu_flags,
        "-pthread",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        *(("-g1", "-fdebug-prefix-map={staging}=.") if keywords.lineinfo else ("-Wl,-s",)),
        "-Wl,-z,defs",
        "-Wall",
        "-Wextra",
    )


def _cuda_flags(record: Record, arch: Arch, toolchain: Toolchain) -> tuple[str, ...]:
    keywords = record.build_keywords
    facts = toolchain.nvcc.facts
    directory = facts["library_directory"]
    return (
        "-std=c++17",
        f"-O{keywords.opt_level}",
        f"-gencode={arch.gencode}",
        "-shared",
        "-cudart=static",
        "-ccbin={cxx}",
        "-Xptxas=-v,--warn-on-spills",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        "-Xlinker=-s",
        "-Xlinker=-z,defs",
        # Names of internal functions hold a digest of the source's absolute path, unless it is given as a bare name.
        *(("-Xcudafe=--orig_src_path_name={source}",) if facts["source_path_option"] else ()),
        *((f"-L{{cuda}}/{directory}",) if directory else ()),
        *(("-lineinfo",) if keywords.lineinfo else ()),
        *((f"-maxrregcount={keywords.max_registers}",) if keywords.max_registers else ()),
        *(("-use_fast_math",) if keywords.fast_math else ()),
    )


def command_line(request: Request, staging: str) -> list[str]:
    """Return the one command that compiles and links a request's source inside the staging directory."""
    toolchain = request.toolchain
    compiler = "{nvcc}" if toolchain.nvcc else "{cxx}"
    outputs = ("-MD", "-MF", DEPFILE, "-o", library_name(request.record), request.source.filename)
    tokens = {**toolchain.tokens, "{staging}": staging, "{source}": request.source.filename}
    return [_expand(part, tokens) for part in (compiler, *request.flags)] + [*request.extra_flags, *outputs]


def _expand(text: str, tokens: dict[str, str]) -> str:
    for token, path in tokens.items():
        text = text.replace(token, path)
    return text
