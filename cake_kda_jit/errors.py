"""Every exception this library raises, in one hierarchy.

A message says what was given or what happened, what is accepted, and what to do. Errors of the compiler carry the
four parts separately, so that a tool can show them and a test can assert them.
"""

from __future__ import annotations


class CakeKdaError(Exception):
    """Root of every exception raised by this library."""


class UnsupportedProblemError(CakeKdaError, ValueError):
    """The inputs describe a problem that no record solves, or contradict each other."""


class PlanMismatchError(UnsupportedProblemError):
    """Ranks of a group, or a plan and a call, disagree about the problem."""


class ConfigError(CakeKdaError, ValueError):
    """An environment variable or knob holds a value outside its kind."""


class BuildError(CakeKdaError, RuntimeError):
    """A kernel could not be built.

    Attributes: ``cause`` (one sentence), ``hint`` (what to do), ``log`` (path of the full log or None),
    ``reproduction`` (one shell line or None), ``first_error`` (the compiler's own first error line or None).
    """

    def __init__(
        self,
        cause: str,
        *,
        hint: str = "",
        log: str | None = None,
        reproduction: str | None = None,
        first_error: str | None = None,
    ) -> None:
        self.cause = cause
        self.hint = hint
        self.log = log
        self.reproduction = reproduction
        self.first_error = first_error
        lines = [cause]
        if first_error:
            lines.append(f"  first error: {first_error}")
        if hint:
            lines.append(f"  hint: {hint}")
        if log:
            lines.append(f"  log: {log}")
        if reproduction:
            lines.append(f"  reproduce: {reproduction}")
        super().__init__("\n".join(lines))


class ToolchainNotFound(BuildError):
    """No compiler for the target was found; the message lists where it was looked for."""


class ToolchainMismatch(BuildError):
    """The parts of a toolchain (compiler, headers, runtime) are of different versions."""


class UnsupportedArch(BuildError):
    """The target is unknown, below the minimum, or not known to the toolchain found."""


class HostCompilerUnsupported(BuildError):
    """The host compiler is outside the range that the CUDA toolkit's own header states."""


class RenderError(BuildError):
    """A template could not be rendered; the message shows the template's lines around the fault."""


class CompileError(BuildError):
    """The compiler or linker returned a failure."""


class EmptyOutput(BuildError):
    """The compiler returned success but its output is missing, empty or not a library."""


class SpillLimitExceeded(BuildError):
    """The compiler spilled more registers than the record allows."""


class CompilerOutOfMemory(BuildError):
    """The compiler was killed, most likely for memory."""


class DiskFull(BuildError):
    """The file system of the cache or of the temporary directory is full."""


class CompileTimeout(BuildError):
    """The compiler ran past ``CAKE_KDA_JIT_COMPILE_TIMEOUT``."""


class LockTimeout(BuildError):
    """Another process held the build lock past ``CAKE_KDA_JIT_LOCK_TIMEOUT`` without a heartbeat."""


class CacheNotWritable(BuildError):
    """The cache directory that the user named cannot be written."""


class LoadError(CakeKdaError, RuntimeError):
    """A library could not be loaded or launched."""


class AbiMismatch(LoadError):
    """A library's argument layout differs from the record's."""


class NotPrebuilt(LoadError):
    """Compiling is disabled and no cached or prebuilt library matches; the message lists where it was looked for."""


class ColdCallInCapture(LoadError):
    """The first call of a kernel happened inside CUDA graph capture; the message names the warm-up call."""


class DriverTooOld(LoadError):
    """The CUDA driver is older than the runtime that a library was built with."""


class ParallelError(CakeKdaError, RuntimeError):
    """A failure of context-parallel execution."""


class CommunicationError(ParallelError):
    """An exchange between ranks did not finish in time, or a peer reported a failure."""
