"""Every failure of a real or fake compiler has its type, and says cause, hint, log and a reproduction that works."""

from __future__ import annotations

import errno
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from cake_kda_jit import errors
from cake_kda_jit.compiler import build as build_module
from cake_kda_jit.compiler import diagnose, ninja, publish
from cake_kda_jit.compiler.build import build
from cake_kda_jit.record import BuildKeywords, Limits

from .tiny import HOST_ARCH, tiny_record

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")


def gain_header(data, text: str) -> None:
    (data / "templates" / "shared" / "gain.hpp").write_text(text)


def fail(kind, record, arch=HOST_ARCH):
    """The error of a build, after checking that its four parts are there and that the reproduction repeats it."""
    with pytest.raises(kind) as caught:
        build(record, arch)
    error = caught.value
    assert type(error) is kind
    lines = str(error).splitlines()
    assert lines[0] == error.cause and record.symbol in error.cause
    assert [line.split(":")[0].strip() for line in lines if line.startswith("  ")][-3:] == ["hint", "log", "reproduce"]
    assert open(error.log).read().strip()
    script = error.reproduction.removeprefix("sh ").strip("'")
    return error, script


REAL = {
    "missing header": ("#include <no_such_header.h>\n", "no_such_header.h: No such file", "the log holds all messages"),
    "link error": ("extern \"C\" int elsewhere();\nstatic float kGain = elsewhere();\n",
                   "undefined reference to `elsewhere'", "the log holds all messages"),
    "syntax": ("constexpr float kGain = ;\n", "expected primary-expression", "the log holds all messages"),
}  # fmt: skip


@pytest.mark.parametrize("text, first, hint", REAL.values(), ids=REAL)
def test_real_compiler_errors(data, text, first, hint):
    gain_header(data, text)
    error, script = fail(errors.CompileError, tiny_record())
    assert first in error.first_error and hint in error.hint
    again = subprocess.run(["sh", script], capture_output=True, text=True, cwd="/")
    assert again.returncode != 0 and first in again.stderr, "the reproduction repeats the failure from any directory"


def test_missing_library(data, monkeypatch):
    monkeypatch.setenv("CAKE_KDA_JIT_EXTRA_FLAGS", "-lnone_such")
    error, _ = fail(errors.CompileError, tiny_record())
    assert "cannot find -lnone_such" in error.first_error


def test_flags_of_another_compiler(data, monkeypatch):
    monkeypatch.setenv("CAKE_KDA_JIT_EXTRA_FLAGS", "--none-such-option")
    error, _ = fail(errors.CompileError, tiny_record())
    assert "CAKE_KDA_JIT_EXTRA_FLAGS" in error.hint


@pytest.mark.parametrize(
    "body, kind, words",
    [
        ("kill -9 $$", errors.CompilerOutOfMemory, "CAKE_KDA_JIT_JOBS=1"),
        ("sh -c 'kill -9 $$'; exit 137", errors.CompilerOutOfMemory, "CAKE_KDA_JIT_JOBS=1"),
        ("echo 'g++: fatal error: Killed signal terminated program'; exit 1", errors.CompilerOutOfMemory, "memory"),
        ("echo \"nvcc error : 'cicc' died due to signal 9 (Kill signal)\"; exit 9",
         errors.CompilerOutOfMemory, "memory"),
        ("echo 'cc1plus: out of memory allocating 65536 bytes'; exit 1", errors.CompilerOutOfMemory, "memory"),
        ("echo terminate called after throwing; echo '  what():  std::bad_alloc'; exit 1",
         errors.CompilerOutOfMemory, "memory"),
        ("echo 'clang++: error: unable to execute command: Killed'; exit 1", errors.CompilerOutOfMemory, "memory"),
        ("echo 'sh: line 1: 4711 Killed   cicc'; exit 1", errors.CompilerOutOfMemory, "memory"),
        ("echo 'virtual memory exhausted: Cannot allocate memory'; exit 1", errors.CompilerOutOfMemory, "memory"),
        ("echo \"nvcc error : 'ptxas' died due to signal 11 (Invalid memory reference)\"; exit 11",
         errors.CompileError, "a part of nvcc crashed"),
        ("echo 'fatal error: error writing to x.s: No space left on device'; exit 1", errors.DiskFull, "free space"),
        ("echo 'x.cu:1:10: fatal error: cuda_runtime.h: No such file or directory'; exit 1", errors.CompileError,
         "headers are missing"),
        ("echo 'cuda_fp16.hpp:54:10: fatal error: nv/target: No such file or directory'; exit 1", errors.CompileError,
         "nvidia-cuda-cccl"),
        ("echo '/usr/bin/ld: cannot find -lcudart_static'; exit 1", errors.CompileError, "libcudart_static.a"),
        ("echo 'sh: 1: cicc: not found'; exit 127", errors.CompileError, "parts of nvcc are missing"),
        ("echo '#error -- unsupported GNU version! gcc versions later than 15 are not supported!'; exit 1",
         errors.HostCompilerUnsupported, "CAKE_KDA_JIT_CXX"),
        ("echo \"nvcc fatal   : Unsupported gpu architecture 'compute_107a'\"; exit 1", errors.UnsupportedArch,
         "toolchain install"),
    ],
)  # fmt: skip
def test_failures_of_every_kind(data, fake_cxx, body, kind, words):
    fake_cxx(body)
    error, _ = fail(kind, tiny_record())
    assert words in error.hint


def test_killed_compiler_is_tried_again(data, fake_cxx):
    fake = fake_cxx("kill -9 $$")
    for _ in range(2):
        fail(errors.CompilerOutOfMemory, tiny_record())
    assert fake.num_calls == 2


def test_spill_of_a_fake_nvcc(data, toolkit, monkeypatch):
    log = (
        "ptxas info    : Compiling entry function '_ZN4tiny6kernelEv' for 'sm_90a'\n"
        "    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers\n"
    )
    fake = toolkit(body=f"cat <<'EOF'\n{log}EOF")
    monkeypatch.setenv("CAKE_KDA_JIT_NVCC", str(fake.nvcc))
    error, _ = fail(errors.SpillLimitExceeded, tiny_record("smxx", limits=Limits(max_spill_bytes=0)), "sm_90a")
    assert "kernel spills 16 bytes of stores and 20 of loads; the record allows 0" in error.cause
    assert "_ZN" not in error.cause
    with pytest.raises(errors.SpillLimitExceeded, match="was not tried again"):
        build(tiny_record("smxx", limits=Limits(max_spill_bytes=0)), "sm_90a")
    raised = tiny_record("smxx", limits=Limits(max_spill_bytes=36))
    assert build(raised, "sm_90a").origin == "built", "another limit is another question"


@pytest.mark.parametrize("limit, is_allowed", [(64, False), (72, True), (None, True)])
def test_limit_of_registers(data, toolkit, monkeypatch, limit, is_allowed):
    log = "ptxas info    : Compiling entry function '_Z5scalePf' for 'sm_90a'\nptxas info    : Used 72 registers\n"
    monkeypatch.setenv("CAKE_KDA_JIT_NVCC", str(toolkit(body=f"cat <<'EOF'\n{log}EOF").nvcc))
    record = tiny_record("smxx", limits=Limits(max_spill_bytes=0, max_registers=limit))
    if is_allowed:
        assert build(record, "sm_90a").origin == "built"
    else:
        error, _ = fail(errors.SpillLimitExceeded, record, "sm_90a")
        assert "scale uses 72 registers; the record allows 64" in error.cause


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("stage", ["write_build_file", "describe"])
def test_disk_that_fills_while_we_write(data, quick_cxx, monkeypatch, cache_dir, number, stage):
    def full(*arguments):
        raise OSError(number, "No space left on device")

    quick_cxx()
    monkeypatch.setattr(ninja if stage == "write_build_file" else publish, stage, full)
    with pytest.raises(errors.DiskFull, match=f"{cache_dir} is full") as caught:
        build(tiny_record(), HOST_ARCH)
    assert "CAKE_KDA_JIT_CACHE_DIR" in caught.value.hint
    assert not list((cache_dir / "v1" / ".staging").iterdir())


@pytest.mark.parametrize("free, kind", [(1 << 10, errors.DiskFull), (1 << 30, errors.CompileError)])
def test_disk_too_full_for_the_message_that_says_so(data, fake_cxx, monkeypatch, free, kind):
    fake_cxx("exit 1")
    monkeypatch.setattr(build_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    fail(kind, tiny_record())


def test_compiler_that_cannot_be_started(data, monkeypatch, tmp_path):
    path = tmp_path / "g++"
    path.write_text("#!/no/such/interpreter\n")
    path.chmod(0o755)
    monkeypatch.setenv("CAKE_KDA_JIT_CXX", str(path))
    with pytest.raises(errors.ToolchainNotFound, match="g\\+\\+ does not run"):
        build(tiny_record(), HOST_ARCH)


def test_c_compiler_in_place_of_a_cpp_compiler(data, monkeypatch):
    """It compiles C++ but links no C++ runtime; the linker's complaints name std::bad_alloc, which is no memory."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("needs gcc")
    gain_header(
        data,
        """#include <new>
static volatile int count = 2;
static float guarded() {
  try { volatile float* made = new float[count]; made[0] = 2; return made[0]; }
  catch (const std::bad_alloc&) { return 0; }
}
static float kGain = guarded();
""",
    )
    monkeypatch.setenv("CAKE_KDA_JIT_CXX", gcc)
    error, _ = fail(errors.CompileError, tiny_record())
    assert "std::bad_alloc" in open(error.log).read()
    assert "undefined reference" in error.first_error and "Name g++" in error.hint


def test_source_that_speaks_of_memory_is_a_compile_error(data):
    gain_header(
        data,
        """#include <new>
#error out of memory, Killed by signal 9: Cannot allocate memory
static float guarded() { try { return 2; } catch (const std::bad_alloc&) { return } }
""",
    )
    error, _ = fail(errors.CompileError, tiny_record())
    assert "#error out of memory" in error.first_error


def test_ninja_that_is_none(data, monkeypatch):
    monkeypatch.setenv("CAKE_KDA_JIT_NINJA", "/bin/false")
    with pytest.raises(errors.ToolchainNotFound, match="ninja ended with status 1 and printed nothing") as caught:
        build(tiny_record(), HOST_ARCH)
    assert "CAKE_KDA_JIT_NINJA" in caught.value.hint
    monkeypatch.delenv("CAKE_KDA_JIT_NINJA")
    assert build(tiny_record(), HOST_ARCH).origin == "built", "it is not remembered"


def test_time_limit_below_a_second_is_said(data, fake_cxx, monkeypatch):
    fake_cxx("sleep 20")
    monkeypatch.setenv("CAKE_KDA_JIT_COMPILE_TIMEOUT", "0.3")
    with pytest.raises(errors.CompileTimeout, match=r"took longer than 0\.3 s"):
        build(tiny_record(), HOST_ARCH)


@pytest.mark.parametrize("name", ["CXX", "NVCC", "NINJA"])
def test_named_tool_that_is_none(data, monkeypatch, name):
    monkeypatch.setenv(f"CAKE_KDA_JIT_{name}", "/no/such/tool")
    with pytest.raises(errors.ToolchainNotFound, match=f"CAKE_KDA_JIT_{name}='/no/such/tool' is not an executable"):
        build(tiny_record("smxx"), "sm_80") if name == "NVCC" else build(tiny_record(), HOST_ARCH)


def test_ninja_is_found_through_its_package(data, monkeypatch):
    """The environment's bin directory need not be on PATH."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if shutil.which("ninja") is None:
        assert ninja.find_ninja().endswith("/ninja")
    assert build(tiny_record(), HOST_ARCH).origin == "built"


def test_missing_ninja_says_how_to_get_it(data, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ninja", None)
    monkeypatch.setattr(ninja.shutil, "which", lambda *a, **k: None)
    with pytest.raises(errors.ToolchainNotFound) as caught:
        ninja.find_ninja()
    assert caught.value.hint == "pip install ninja"


def test_log_of_nothing_has_no_first_error():
    assert diagnose.first_error("") is None


@needs_nvcc
def test_real_nvcc_failures(data, monkeypatch):
    """A missing header, and a real spill: a kernel held to 24 registers."""
    record = tiny_record("smxx", limits=Limits(max_spill_bytes=0), build_keywords=BuildKeywords(max_registers=24))
    template = data / "templates" / "smxx" / "tiny.cu.jinja"
    spilling = "  float x[64];\n  for (int i = 0; i < 64; ++i) x[i] = values[i * 7 + threadIdx.x];\n"
    spilling += "  __syncthreads();\n"
    spilling += "  for (int i = 0; i < 64; ++i) values[i * 5 + threadIdx.x] = x[i] * x[(i + 31) % 64] * factor;\n"
    head = "__global__ void scale(float* values, int64_t count, float factor) {\n"
    template.write_text(template.read_text().replace(head, head + spilling))
    error, _ = fail(errors.SpillLimitExceeded, record, "sm_90a")
    assert "scale" in error.cause and "the record allows 0" in error.cause
    gain_header(data, "#include <no_such_header.h>\n")
    error, _ = fail(errors.CompileError, record, "sm_90a")
    assert "no_such_header.h: No such file" in error.first_error
