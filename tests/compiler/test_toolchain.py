"""Finding and identifying compilers, and building for CUDA with a real nvcc where there is one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cake_kda_jit import errors
from cake_kda_jit.arch import get_arch
from cake_kda_jit.compiler import discover, identify
from cake_kda_jit.compiler.build import build
from cake_kda_jit.compiler.elf import read_library
from cake_kda_jit.record import Limits

from .tiny import HOST_ARCH, tiny_record

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")

# Stands for nvcc without having one: it answers questions, and compiles with g++ what it is given as C++.
FAKE_NVCC = r"""#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release 12.4, V12.4.99"; exit 0;;
  *--dryrun*) echo "no such thing"; exit 0;;
  *--list-gpu-code*) exit 0;;
esac
echo "$NVCC_APPEND_FLAGS|$CPATH|$*" >> "$0.calls"
exit 1
"""


@pytest.fixture
def fake_nvcc(monkeypatch, tmp_path):
    path = tmp_path / "nvcc"
    path.write_text(FAKE_NVCC)
    path.chmod(0o755)
    monkeypatch.setenv("CAKE_KDA_JIT_NVCC", str(path))
    return path


def test_identity_holds_contents_and_no_path(fake_cxx):
    first = discover.find_host_compiler()
    assert len(first.identity["binaries"]["driver"]) == 64 and first.identity["version"]
    assert "/" not in json.dumps(first.identity)


def test_cxx_and_gxx_are_one_compiler(monkeypatch):
    found = []
    for name in ("g++", "c++"):
        monkeypatch.setenv("CAKE_KDA_JIT_CXX", name)
        found.append(discover.find_host_compiler())
    assert found[0].identity == found[1].identity and found[0].path != found[1].path


def test_memo_is_dropped_when_the_compiler_changes(fake_cxx, monkeypatch):
    fake = fake_cxx()
    before = discover.find_host_compiler()
    with monkeypatch.context() as frozen:
        frozen.setattr("subprocess.run", None)
        assert discover.find_host_compiler() == before, "the memo answers"
    fake.path.write_text(fake.path.read_text() + "# changed\n")
    assert discover.find_host_compiler().identity["binaries"] != before.identity["binaries"]


def test_named_compiler_that_is_not_there_is_no_fallback(monkeypatch):
    monkeypatch.setenv("CAKE_KDA_JIT_CXX", "/nowhere/g++")
    with pytest.raises(errors.ToolchainNotFound, match="/nowhere/g\\+\\+"):
        discover.find_host_compiler()
    monkeypatch.delenv("CAKE_KDA_JIT_CXX")
    monkeypatch.setenv("CAKE_KDA_JIT_NVCC", "/nowhere/nvcc")
    with pytest.raises(errors.ToolchainNotFound, match="CAKE_KDA_JIT_NVCC"):
        discover.find_toolchain(get_arch("sm_80"))


def test_old_nvcc_is_refused_before_running(data, fake_nvcc):
    with pytest.raises(errors.UnsupportedArch, match="nvcc 12.4.99 .* does not know sm_100a") as caught:
        build(tiny_record("smxx"), "sm_100a")
    assert "12.8" in caught.value.hint
    assert not fake_nvcc.with_name("nvcc.calls").exists()


def test_old_nvcc_still_uses_what_a_newer_one_built(data, fake_nvcc):
    library = build(tiny_record(), HOST_ARCH).library
    compiles = FAKE_NVCC.replace("exit 1", f"cp '{library}' tiny__fp32.so\nexit 0")
    fake_nvcc.write_text(compiles.replace("12.4", "12.8"))
    assert build(tiny_record("smxx"), "sm_100a").origin == "built"
    fake_nvcc.write_text(FAKE_NVCC)
    hit = build(tiny_record("smxx"), "sm_100a")
    assert hit.origin == "cache" and "does not know sm_100a" in hit.reason


def test_foreign_variables_are_scrubbed_with_a_warning(data, fake_nvcc, monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    monkeypatch.setenv("CPATH", "/somewhere")
    monkeypatch.setenv("CAKE_KDA_JIT_EXTRA_FLAGS", "-lineinfo")
    with pytest.warns(UserWarning, match="NVCC_APPEND_FLAGS=-G is ignored"), pytest.raises(errors.CompileError):
        build(tiny_record("smxx"), "sm_90a")
    appended, search_path, command = fake_nvcc.with_name("nvcc.calls").read_text().strip().split("|")
    assert (appended, search_path) == ("", "")
    words = command.split()
    assert "-lcuda" not in words and "-lineinfo" in words
    assert "-gencode=arch=compute_90a,code=sm_90a" in words and "-cudart=static" in words
    assert any(word.startswith("-ccbin=/") for word in words)


def test_spills_fail_only_where_the_record_limits_them(data, fake_nvcc, monkeypatch):
    log = (
        "ptxas info    : Compiling entry function 'tiny' for 'sm_90a'\n"
        "    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem, 552 bytes cmem[0]\n"
    )
    library = build(tiny_record(), HOST_ARCH).library
    fake_nvcc.write_text(FAKE_NVCC.replace("exit 1", f"cat <<'EOF'\n{log}EOF\ncp '{library}' tiny__fp32.so\nexit 0"))
    with pytest.raises(errors.SpillLimitExceeded, match="16 bytes of stores and 20 of loads; the record allows 0"):
        build(tiny_record("smxx", limits=Limits(max_spill_bytes=0)), "sm_90a")
    artifact = build(tiny_record("smxx", limits=Limits(max_spill_bytes=36), variant="fp32"), "sm_80")
    (kernel,) = json.loads((artifact.directory / "report.json").read_text())["kernels"]
    assert (kernel["registers"], kernel["shared_bytes"], kernel["constant_bytes"]) == (255, 1024, 552)
    with pytest.raises(errors.SpillLimitExceeded, match="uses 255 registers; the record allows 128"):
        build(tiny_record("smxx", limits=Limits(max_spill_bytes=None, max_registers=128)), "sm_86")


@needs_nvcc
def test_real_nvcc_builds_the_same_bytes_twice(data, tmp_path, monkeypatch):
    libraries = []
    for name in ("one", "another place"):
        monkeypatch.setenv("CAKE_KDA_JIT_CACHE_DIR", str(tmp_path / name))
        artifact = build(tiny_record("smxx", limits=Limits(max_spill_bytes=0)), "sm_90a")
        libraries.append(artifact.library.read_bytes())
    assert libraries[0] == libraries[1]
    assert not [name for name in read_library(artifact.library).needed if "cuda" in name]
    (kernel,) = json.loads((artifact.directory / "report.json").read_text())["kernels"]
    assert kernel["registers"] > 0 and kernel["spill_store_bytes"] == 0
    cuda = artifact.provenance["toolchain"]["cuda"]
    assert set(cuda["binaries"]) >= {"nvcc", "ptxas", "cicc", "cudafe++"} and cuda["cudart"] >= 11000


@needs_nvcc
def test_wrapper_and_real_nvcc_are_one_toolchain(monkeypatch, tmp_path):
    host = discover.find_host_compiler()
    found = discover.find_nvcc(host)
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec "{found.path}" "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(wrapper.parent), prepend=":")
    assert discover.find_nvcc(host) == found


@needs_nvcc
def test_real_toolkit_with_lib_only_links(data, tmp_path, monkeypatch):
    """As Python packages lay it out: ``lib`` and no ``lib64``, and an nvcc whose profile searches neither."""
    found = discover.find_nvcc(discover.find_host_compiler())
    real, root = Path(found.facts["root"]), tmp_path / "lib only"
    (root / "bin").mkdir(parents=True)
    for name in ("include", "nvvm"):
        (root / name).symlink_to(real / name)
    for path in (real / "bin").iterdir():
        if path.name == "nvcc":
            shutil.copy(path, root / "bin" / "nvcc")  # it finds its parts beside its own real path
        elif path.name != "nvcc.profile":
            (root / "bin" / path.name).symlink_to(path)
    profile = (real / "bin" / "nvcc.profile").read_text()
    lines = [line for line in profile.splitlines() if not line.startswith("LIBRARIES")]
    (root / "bin" / "nvcc.profile").write_text("\n".join(lines).replace("$(_TARGET_DIR_)", "") + "\n")
    static = identify._first_file(str(real), ("lib64", "targets/*/lib", "lib"), "libcudart_static.a")
    (root / "lib").symlink_to(Path(static).parent)
    if not (root / "include" / "cuda_runtime.h").exists():
        (root / "include").unlink()
        (root / "include").symlink_to(Path(identify.find_header(str(real), "cuda_runtime.h")).parent)
    monkeypatch.setenv("CAKE_KDA_JIT_NVCC", str(root / "bin" / "nvcc"))
    artifact = build(tiny_record("smxx"), "sm_80")
    assert artifact.origin == "built" and "-L{cuda}/lib" in artifact.provenance["flags"]
