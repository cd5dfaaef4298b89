"""Show by hand what the compiler promises: why it builds, that it builds once, and how it fails.

    python tests/show_compiler.py [PART...]        parts: why, cold, killed, full, doctor; default: all

Everything happens in a temporary directory, with real kernels of the cpu family. What needs nvcc or root is skipped
where there is none, and says so. Takes about a minute.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cake_kda_jit import config  # noqa: E402
from cake_kda_jit.arch import host_arch  # noqa: E402
from cake_kda_jit.compiler.discover import all_nvccs, find_host_compiler, find_toolchain  # noqa: E402
from cake_kda_jit.errors import BuildError  # noqa: E402
from tests.compiler.toolkit import FakeToolkit  # noqa: E402

HOST = host_arch().name
KERNEL = ("parameter_reduce", "fp32")
CUDA_KERNEL = ("pack_tables", "int64", "--arch", "sm_90a")
VERB = "import sys\nfrom pathlib import Path\nfrom cake_kda_jit import paths\n{data}from cake_kda_jit.cli import main\n"
WORKER = (
    "import json, time\nfrom cake_kda_jit import load, registry\nfrom cake_kda_jit.compiler.build import build\n"
    f"artifact = build(registry().get({KERNEL[0]!r}, {KERNEL[1]!r}, 'cpu'), {HOST!r})\n"
    "load(artifact)\nprint(json.dumps([artifact.origin, artifact.sha256]))\n"
)


class Show:
    """One demonstration's temporary directory, its cache and the environment of the processes it starts."""

    def __init__(self, place: Path) -> None:
        self.place, self.cache = place, place / "cache"
        self.changes: dict[str, str] = {"CAKE_KDA_JIT_CACHE_DIR": str(self.cache), "PYTHONPATH": str(ROOT)}
        self.data: Path | None = None

    def environment(self, **changes: str) -> dict[str, str]:
        """The environment for a child."""
        return config.environment(without=("CAKE_KDA_JIT_PREBUILT",), **{**self.changes, **changes})

    def cli(self, *arguments: str, keep: tuple[str, ...] = (), **changes: str) -> int:
        """Run a verb and print those of its lines that hold one of ``keep``, all by default."""
        data = f"paths.data_dir = lambda: Path({str(self.data)!r})\n" if self.data else ""
        code = VERB.format(data=data) + f"sys.exit(main({list(arguments)!r}))\n"
        done = subprocess.run([sys.executable, "-c", code], env=self.environment(**changes), capture_output=True,
                              text=True)  # fmt: skip
        lines = (done.stdout + done.stderr).replace(str(self.place), "DIR").splitlines()
        for line in lines:
            if not keep or any(word in line for word in keep):
                print(f"    {line[:160]}")
        return done.returncode

    def worker(self, **changes: str) -> subprocess.Popen:
        """Start a process that builds and loads the kernel."""
        return subprocess.Popen([sys.executable, "-c", WORKER], env=self.environment(**changes), stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)  # fmt: skip

    def wrapped_compiler(self, *lines: str) -> Path:
        """Write a host compiler that runs ``lines`` before each compilation and counts it."""
        real = find_host_compiler().path
        path = self.place / "wrapped-g++"
        body = "\n".join(lines)
        path.write_text(
            f'#!/bin/sh\ncase " $* " in *" -shared "*) echo x >> "{self.place}/compilations"\n{body}\n;; esac\n'
            f'exec {real} "$@"\n'
        )
        path.chmod(0o755)
        return path

    def left(self, name: str) -> list[str]:
        """What stands in one of the cache's own directories."""
        path = self.cache / "v1" / name
        return sorted(os.listdir(path)) if path.is_dir() else []


@contextlib.contextmanager
def show(title: str) -> Iterator[Show]:
    """Print a title and give an empty place."""
    print(f"\n== {title}")
    with tempfile.TemporaryDirectory(prefix="show ") as place:
        yield Show(Path(place))


def show_why() -> None:
    """``why`` after a change of one flag, one included file, the host compiler, and the CUDA toolkit."""
    with show("why: which field of the key differs") as here:
        here.data = here.place / "data"
        shutil.copytree(ROOT / "templates", here.data / "templates")
        for name in ("build.json", "build.test.json"):
            shutil.copy(ROOT / name, here.data)
        arguments = ("why", *KERNEL, "--arch", HOST)
        kept = ("would be", "found:", " differ", " now", "the same")
        done = here.worker()
        done.communicate()
        print("  unchanged")
        here.cli(*arguments, keep=kept)
        print("  one flag: CAKE_KDA_JIT_EXTRA_FLAGS=-DX=1")
        here.cli(*arguments, keep=kept, CAKE_KDA_JIT_EXTRA_FLAGS="-DX=1")
        print("  the host compiler: a wrapper in its place")
        here.cli(*arguments, keep=kept, CAKE_KDA_JIT_CXX=str(here.wrapped_compiler()))
        print("  one included file: a comment in templates/host/args.jinja")
        header = here.data / "templates" / "host" / "args.jinja"
        header.write_text("// changed\n" + header.read_text(encoding="utf-8"), encoding="utf-8")
        here.cli(*arguments, keep=kept)
        here.data = None
        _show_toolkits(here, kept)


def _show_toolkits(here: Show, kept: tuple[str, ...]) -> None:
    nvccs = {tool.identity["version"]: tool.path for _, tool, _ in all_nvccs(find_host_compiler()) if tool}
    if len(nvccs) < 2:
        print(f"  the CUDA toolkit: SKIPPED, it takes two releases of nvcc; found: {', '.join(nvccs) or 'none'}")
        return
    (first, one), (second, other) = list(nvccs.items())[:2]
    print(f"  the CUDA toolkit: built with nvcc {first}, asked with {second}")
    code = (f"from cake_kda_jit import build, registry\n"
            f"build(registry().get({CUDA_KERNEL[0]!r}, {CUDA_KERNEL[1]!r}, 'smxx'), 'sm_90a')\n")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], env=here.environment(CAKE_KDA_JIT_NVCC=one), check=True)
    here.cli("why", *CUDA_KERNEL, keep=kept, CAKE_KDA_JIT_NVCC=other)


def show_cold() -> None:
    """16 processes, one kernel, an empty cache."""
    with show("16 processes on a cold cache") as here:
        changes = {"CAKE_KDA_JIT_CXX": str(here.wrapped_compiler())}
        began = time.monotonic()
        workers = [here.worker(**changes) for _ in range(16)]
        results = [json.loads(worker.communicate()[0]) for worker in workers]
        seconds = time.monotonic() - began
        compilations = len((here.place / "compilations").read_text().splitlines())
        origins = [origin for origin, _ in results]
        print(f"    {compilations} compilation, {len(results)} loads of {len({d for _, d in results})} library: "
              f"{origins.count('built')} built, {origins.count('cache')} from the cache; {seconds:.1f} s on "
              f"{os.cpu_count()} cores")  # fmt: skip
        began = time.monotonic()
        here.worker(**changes).communicate()
        print(f"    one more process on the warm cache: {time.monotonic() - began:.2f} s with its start")


def show_killed() -> None:
    """kill -9 in the middle of a build, then a build as if nothing had happened."""
    with show("kill -9 in mid-build") as here:
        slow = {"CAKE_KDA_JIT_CXX": str(here.wrapped_compiler('[ -e "$0.go" ] || sleep 60'))}
        worker = here.worker(**slow)
        while not (here.place / "compilations").exists():
            time.sleep(0.05)
        here.cli("doctor", keep=("builds:",))
        os.kill(worker.pid, signal.SIGKILL)
        worker.communicate()
        print(f"    killed; left behind: .staging {len(here.left('.staging'))}, .locks {len(here.left('.locks'))}, "
              f"entries {len(here.left(HOST))}")  # fmt: skip
        (here.place / "wrapped-g++.go").touch()
        began = time.monotonic()
        out, err = here.worker(**slow).communicate()
        print(f"    {err.strip()}")
        print(f"    the next process: {json.loads(out)[0]} in {time.monotonic() - began:.1f} s; then .staging "
              f"{here.left('.staging')}, entries {here.left(HOST)}")  # fmt: skip


def show_full() -> None:
    """A cache on a file system that is too small."""
    with show("a full disk") as here:
        disk = here.place / "disk"
        disk.mkdir()
        size = "64k"
        if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)],
                                          capture_output=True).returncode:  # fmt: skip
            print("    SKIPPED: it takes root, to mount a small file system")
            return
        try:
            here.cache = disk / "cache"
            _, err = here.worker(CAKE_KDA_JIT_CACHE_DIR=str(here.cache)).communicate()
            lines = err.replace(str(here.place), "DIR").splitlines()
            raised = [n for n, line in enumerate(lines) if line.startswith("cake_kda_jit.errors.")]
            print("\n".join(f"    {line}" for line in lines[raised[0] if raised else 0 :]))
            entries = here.left(HOST)
            print(f"    afterwards: .staging {here.left('.staging')}, entries {entries}")
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            out, _ = here.worker(CAKE_KDA_JIT_CACHE_DIR=str(here.cache)).communicate()
            print(f"    with more room: {json.loads(out)[0]}, nothing to clean up by hand")
        finally:
            subprocess.run(["umount", str(disk)], check=True)


def show_doctor() -> None:
    """``doctor`` with nvcc, with an empty PATH, and with headers of another release."""
    kept = ("compiler", "nvcc", "broken", "cache:", "chunk_kda on", "->")
    with show("doctor") as here:
        nvcc = next((tool for _, tool, _ in all_nvccs(find_host_compiler()) if tool), None)
        print("  with nvcc" if nvcc else "  with nvcc: SKIPPED, there is none; without it")
        print(f"    exit code {here.cli('doctor', keep=kept)}")
        empty = here.place / "empty"
        empty.mkdir()
        print("  with an empty PATH")
        print(f"    exit code {here.cli('doctor', keep=kept, PATH=str(empty))}")
        mixed = _mixed_toolkit(here, nvcc.facts["root"] if nvcc else None)
        print(f"  with headers of another release ({'a copy of the toolkit' if nvcc else 'a fake toolkit'})")
        print(f"    exit code {here.cli('doctor', keep=kept, CAKE_KDA_JIT_NVCC=str(mixed))}")


def _mixed_toolkit(here: Show, root: str | None) -> Path:
    """Make a toolkit whose runtime headers are of CUDA 12.8; returns its nvcc."""
    place = here.place / "mixed"
    if root is None:
        return FakeToolkit(place, Path(os.devnull), "13.5", headers="12.8").nvcc
    shutil.copytree(root, place, symlinks=True, copy_function=os.symlink)
    for name in ("nvcc", "nvcc.profile"):
        (place / "bin" / name).unlink()
        shutil.copy(Path(root) / "bin" / name, place / "bin" / name)
    for header in place.glob("**/cuda_runtime_api.h"):
        text = header.read_text(encoding="utf-8")
        header.unlink()
        old = next(line for line in text.splitlines() if line.startswith("#define CUDART_VERSION"))
        header.write_text(text.replace(old, "#define CUDART_VERSION 12080"), encoding="utf-8")
    return place / "bin" / "nvcc"


PARTS = {"why": show_why, "cold": show_cold, "killed": show_killed, "full": show_full, "doctor": show_doctor}


def main() -> int:
    """Show the parts that are named, or all."""
    named = sys.argv[1:] or list(PARTS)
    if not set(named) <= PARTS.keys():
        print(f"parts: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    try:
        find_toolchain(host_arch())
    except BuildError as error:
        print(f"a C++ compiler is needed: {error}", file=sys.stderr)
        return 1
    for name in named:
        PARTS[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
