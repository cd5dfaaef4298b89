"""Training kernels for Kimi Delta Attention, compiled just in time.

Importing the package imports neither torch nor jinja2, compiles nothing and touches no GPU: public names load their
module when they are first used.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "ops.api": ("causal_conv1d", "chunk_kda", "segment_summary", "transfer_walk"),
    "ops.pack": ("Fragment",),
    "ops.plan": ("Plan", "make_plan"),
    "ops.problem": ("KdaOptions",),
    "cp.context": ("KcpContext",),
    "cp.options": ("KcpOptions",),
    "cp.parameters": ("reduce_parameter_gradients",),
    "cp.partition": ("Partition",),
    "cp.virtual": ("VirtualGroup", "run_virtual"),
    "cp.whole": ("gather",),
    "runtime.launch": ("LaunchRecord", "last_launches"),
    "runtime.load": ("load",),
    "catalog": ("Registry", "registry"),
    "record": ("Record",),
    "codegen.render": ("RenderedSource", "render"),
    "compiler.build": ("Artifact", "build"),
    "compiler.manifest": ("prebuild",),
    "config": ("TRANSFER_WALKS",),
    "errors": (
        "AbiMismatch",
        "BuildError",
        "CacheNotWritable",
        "CakeKdaError",
        "ColdCallInCapture",
        "CommunicationError",
        "CompileError",
        "CompileTimeout",
        "CompilerOutOfMemory",
        "ConfigError",
        "DiskFull",
        "DriverTooOld",
        "EmptyOutput",
        "HostCompilerUnsupported",
        "LoadError",
        "LockTimeout",
        "NotPrebuilt",
        "ParallelError",
        "PlanMismatchError",
        "RenderError",
        "SpillLimitExceeded",
        "ToolchainMismatch",
        "ToolchainNotFound",
        "UnsupportedArch",
        "UnsupportedProblemError",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str):
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
