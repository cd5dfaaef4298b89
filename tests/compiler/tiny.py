"""A kernel that compiles in a fraction of a second, its templates, and fake compilers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from cake_kda_jit.arch import CPU_ARCHES, CUDA_ARCHES, host_arch
from cake_kda_jit.record import Entry, Field, Limits, Record, make_params

ROOT = Path(__file__).resolve().parents[2]
HOST_ARCH = host_arch().name

ENTRY = Entry((Field("values", "ptr", "[count] fp32"), Field("count", "i64", "elements"), Field("factor", "f32")))


def tiny_record(family: str = "cpu", /, **changes) -> Record:
    """Multiplies ``count`` floats by ``factor`` and by the constant ``gain``."""
    cpu = family == "cpu"
    given = {
        "program": "tiny",
        "variant": "fp32",
        "family": family,
        "params": make_params(gain=2),
        "archs": CPU_ARCHES if cpu else CUDA_ARCHES,
        "template": "cpu/tiny.cpp.jinja" if cpu else "smxx/tiny.cu.jinja",
        "entry": ENTRY,
        "limits": Limits(max_spill_bytes=None),
    }
    return Record(**{**given, **changes})


HEAD = """\
{% include "host/args.jinja" %}
{% include "shared/gain.hpp" %}

namespace {

Status check(const Args& args) {
  if (args.count < 0) return fail(kBadArgument, "count is %lld", static_cast<long long>(args.count));
  return kOk;
}

void grid_size(const Args&, int64_t size[3]) { size[0] = size[1] = size[2] = 1; }

"""
CPU_TEMPLATE = (
    HEAD
    + """\
Status launch(const Args& args, const int64_t*, void*) {
  float* values = static_cast<float*>(args.values);
  for (int64_t i = 0; i < args.count; ++i) values[i] *= args.factor * kGain;
  return kOk;
}

}  // namespace

{% include "host/entry.jinja" %}
"""
)
CUDA_TEMPLATE = (
    HEAD
    + """\
__global__ void scale(float* values, int64_t count, float factor) {
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) values[i] *= factor * kGain;
}

Status launch(const Args& args, const int64_t*, void* stream) {
  scale<<<1, 128, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<float*>(args.values), args.count, args.factor);
  return cudaGetLastError() == cudaSuccess ? kOk : kLaunchFailed;
}

}  // namespace

{% include "host/entry.jinja" %}
"""
)


def write_templates(data: Path) -> Path:
    """Write a data directory with the tiny kernel's templates beside the real host ones; returns it."""
    templates = data / "templates"
    shutil.copytree(ROOT / "templates" / "host", templates / "host")
    for name, text in (
        ("cpu/tiny.cpp.jinja", CPU_TEMPLATE),
        ("smxx/tiny.cu.jinja", CUDA_TEMPLATE),
        ("shared/gain.hpp", "constexpr float kGain = {{ gain }};\n"),
    ):
        (templates / name).parent.mkdir(parents=True, exist_ok=True)
        (templates / name).write_text(text)
    return data


class FakeCompiler:
    """A script that stands for a compiler: questions go to the real one, compilations run ``body`` first.

    In ``body``, ``$out`` is the output file; it falls through to the real compiler unless it exits. ``answers`` are
    texts for questions by the option that asks: ``dumpmachine``, ``version``, ``dM`` (the predefined macros).
    """

    def __init__(self, path: Path, real: str, body: str = "", answers: dict[str, str] | None = None) -> None:
        self.path, self.calls = path, path.with_suffix(".calls")
        path.write_text(
            "#!/bin/sh\n"
            + "".join(
                f"case \" $* \" in *' -{name} '*|*' --{name} '*) printf '%s\\n' '{text}'; exit 0;; esac\n"
                for name, text in (answers or {}).items()
            )
            + 'out=; last=; compiles=\nfor a in "$@"; do\n'
            '  [ "$last" = -o ] && out=$a\n  [ "$a" = -shared ] && compiles=1\n  last=$a\ndone\n'
            f'if [ -n "$compiles" ]; then\n  echo "$@" >> "{self.calls}"\n  :\n  {body}\nfi\nexec {real} "$@"\n'
        )
        path.chmod(0o755)

    @property
    def num_calls(self) -> int:
        """How many compilations were asked of it."""
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


def start_worker(data: Path, *arguments: str, **environment: str) -> subprocess.Popen:
    """Start a fresh process that builds the tiny kernel and prints a JSON line about it."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.compiler.worker", str(data), *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(worker: subprocess.Popen, timeout: float = 60) -> dict:
    """Return what a worker printed; its standard error stands under ``stderr``."""
    out, err = worker.communicate(timeout=timeout)
    assert worker.returncode == 0, err
    return {**json.loads(out), "stderr": err}
