"""``doctor`` and ``toolchain``: what is tested, what is said, what the exit code is."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest

from cake_kda_jit.cli import doctor as doctor_verb
from cake_kda_jit.compiler import discover, doctor, flock, lock, pip_toolchain, roots
from cake_kda_jit.compiler.build import build

from ..compiler.tiny import HOST_ARCH, tiny_record


@pytest.fixture
def examine(cli):
    """Run doctor; returns the exit code and the findings by check, (status, text, what to do) each."""

    def run():
        code, out, _ = cli("doctor", "--json")
        return code, {row["check"]: (row["status"], row["says"], row["do"]) for row in json.loads(out)}

    return run


@pytest.fixture
def use(toolkit, monkeypatch, no_cuda):
    def make(*arguments, **options):
        found = toolkit(*arguments, **options)
        monkeypatch.setenv("CUDA_HOME", str(found.root))
        return found

    return make


def test_sound_machine(examine, use, cli):
    fake = use()
    code, found = examine()
    assert code == 0 and {status for status, _, _ in found.values()} == {"ok"}
    assert {"host link probe", "nvcc link probe", "nvcc targets", "ninja", "cache", "locks", "jobs"} <= found.keys()
    assert "MiB are free at" in found["disk"][1] and found["builds"][1] == "no process is building here"
    assert "knows sm_80" in found["nvcc targets"][1] and "does not know sm_107a" in found["nvcc targets"][1]
    assert "toolchain install" in found["nvcc targets"][2]
    assert "CUDA_HOME" in found["nvcc"][1] and len(fake.calls) == 1, "the probe is a compilation"
    code, out, _ = cli("doctor")
    assert code == 0 and out.splitlines()[-1] == "nothing is broken"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
def test_real_nvcc_is_probed(examine):
    code, found = examine()
    assert code == 0 and found["nvcc link probe"][0] == "ok" and "knows sm_80" in found["nvcc targets"][1]


def test_headers_of_another_release(examine, use):
    use(release="13.5", headers="13.0")
    code, found = examine()
    status, says, do = found["nvcc match"]
    assert code == 1 and status == "broken" and "headers of CUDA 13.0" in says and "toolchain install" in do
    assert "nvcc link probe" not in found, "what is known to be mixed is not compiled"


def test_host_compiler_newer_than_the_toolkit_accepts(examine, use, fake_cxx):
    use(max_gcc=15)
    fake_cxx(dM="#define __GNUC__ 16")
    code, found = examine()
    assert code == 1 and "accepts gcc up to 15" in found["nvcc match"][1] and "g++-15" in found["nvcc match"][2]


def test_nvcc_that_cannot_link(examine, use):
    use(body="echo '/usr/bin/ld: cannot find -lcudart_static' >&2; exit 1")
    code, found = examine()
    assert code == 1 and found["nvcc link probe"][:2] == ("broken", "/usr/bin/ld: cannot find -lcudart_static")


def test_nvcc_whose_output_is_empty(examine, use):
    use(body=': > "$out"; exit 0')
    code, found = examine()
    assert code == 1 and "returned success, but its output is not a 64-bit" in found["nvcc link probe"][1]


def test_broken_nvcc_and_a_good_one_after_it(examine, use, toolkit, monkeypatch):
    broken = use()
    broken.nvcc.write_text("#!/bin/sh\nexit 3\n")
    good = toolkit("good")
    monkeypatch.setattr(discover, "USUAL_CUDA", str(good.root))
    code, found = examine()
    assert code == 1 and "does not run: exit status 3" in found["nvcc"][1]
    assert found["nvcc (not used)"][0] == "ok", "what could be used instead is shown"


@pytest.mark.parametrize("device, prebuilt, status", [(None, False, "warning"), ("sm_90a", False, "broken"),
                                                      ("sm_90a", True, "warning")])  # fmt: skip
def test_no_nvcc(no_cuda, device, prebuilt, status, monkeypatch, tmp_path):
    """Broken only where a GPU needs it and no prebuilt kernels stand in."""
    if prebuilt:
        (tmp_path / "prebuilt" / "v1" / "sm_90a" / "tiny__fp32.0").mkdir(parents=True)
        monkeypatch.setenv("CAKE_KDA_JIT_PREBUILT", str(tmp_path / "prebuilt"))
    (finding,) = [one for one in doctor.examine(device) if one.check == "nvcc"]
    assert finding.status == status and "none found (looked at CUDA_HOME, PATH" in finding.says
    assert "toolchain install" in finding.do


def test_gpu_that_the_nvcc_does_not_know(use, monkeypatch):
    use()
    (finding,) = [one for one in doctor.examine("sm_107a") if one.check == "device"]
    assert finding.status == "broken" and "is sm_107a, which nvcc 13.0.99 does not know" in finding.says


def test_no_compiler_at_all(examine, monkeypatch, tmp_path, no_cuda, data):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, found = examine()
    assert code == 1 and found["host compiler"][0] == "broken" and "install g++" in found["host compiler"][2]
    assert found["ninja"][0] == "ok", "it comes from its package"


def test_machine_with_prebuilt_kernels_alone(examine, monkeypatch, tmp_path, no_cuda, data, cache_dir, cli, records):
    """No compiler, compiling disabled: doctor, list, verify and gc work, and nothing is broken."""
    build(tiny_record(), HOST_ARCH)
    shutil.copytree(cache_dir, tmp_path / "prebuilt")
    shutil.rmtree(cache_dir)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CAKE_KDA_JIT_PREBUILT", str(tmp_path / "prebuilt"))
    monkeypatch.setenv("CAKE_KDA_JIT_DISABLE", "1")
    code, found = examine()
    assert code == 0 and found["host compiler"][0] == "warning"
    assert "1 kernels" in found["prebuilt"][1]
    assert build(tiny_record(), HOST_ARCH).origin == "prebuilt"
    code, out, _ = cli("list", "--built", "--json")
    assert code == 0 and [row["built"] for row in json.loads(out)] == [[HOST_ARCH]]
    assert cli("cache", "verify", "--dir", tmp_path / "prebuilt")[0] == 0
    assert cli("cache", "gc")[0] == 0 and cli("cache", "ls")[0] == 0
    assert not cache_dir.exists()


def test_cache_that_cannot_be_written(examine, monkeypatch, no_cuda):
    monkeypatch.setattr(roots, "_write_fault", lambda root: "Read-only file system")
    code, found = examine()
    assert code == 1 and found["cache"][0] == "broken" and "Read-only file system" in found["cache"][1]


def test_cache_on_a_file_system_without_execution(examine, monkeypatch, no_cuda):
    class Mount:
        f_flag, f_frsize, f_blocks, f_bfree, f_bavail = os.ST_NOEXEC, 4096, 1000, 100, 100

    monkeypatch.setattr(doctor.os, "statvfs", lambda path: Mount)
    code, found = examine()
    assert code == 1 and "noexec" in found["cache mount"][1]
    assert found["disk"][0] == "warning" and "0 MiB are free" in found["disk"][1]


def test_file_system_without_locks(examine, monkeypatch, no_cuda):
    def fail(handle, kind):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(flock.fcntl, "flock", fail)
    code, found = examine()
    assert code == 0 and found["locks"][0] == "warning" and "No locks available" in found["locks"][1]


def test_held_locks_are_told_with_holder_and_age(examine, no_cuda, cache_dir, quick_locks):
    with lock.build_lock(cache_dir, "tiny__fp32.0123456789ab"):
        code, found = examine()
        status, says, _ = found["builds"]
        assert code == 0 and status == "ok" and "tiny__fp32.0123456789ab is held by process" in says
        assert f"process {os.getpid()} on " in says and "building since " in says
        with pytest.raises(flock.Busy):
            flock.lock_file(cache_dir / "v1" / ".locks" / "tiny__fp32.0123456789ab.lock")
    assert examine()[1]["builds"][1] == "no process is building here"


def test_lock_whose_holder_is_silent_is_a_warning(examine, no_cuda, cache_dir):
    path = cache_dir / "v1" / ".locks" / "tiny__fp32.0123456789ab.lock"
    path.parent.mkdir(parents=True)
    handle = flock.lock_file(path)
    holder = path.with_suffix(".holder")
    try:
        assert examine()[1]["builds"][:2] == ("warning", "tiny__fp32.0123456789ab is held by another process")
        holder.write_text(json.dumps({"pid": 7, "host": "far", "start": 1000.0, "heartbeat": 3}))
        os.utime(holder, (1000, 1000))
        status, says, do = examine()[1]["builds"]
        assert status == "warning" and "process 7 on far" in says and "without a sign of life" in says
        assert str(path) in do
    finally:
        flock.release(handle)


def test_driver_is_told(examine, no_cuda, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_verb, "DRIVER", tmp_path / "version")
    assert "no NVIDIA driver is loaded" in examine()[1]["driver"][1]
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module  570.86.15\nGCC version: 12\n")
    assert examine()[1]["driver"][1] == "NVIDIA UNIX Open Kernel Module  570.86.15"


def test_torch_is_optional(examine, no_cuda, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    code, found = examine()
    assert code == 0 and found["torch"][0] == "warning" and "pip install torch" in found["torch"][2]
    assert found[f"chunk_kda on {HOST_ARCH}"][0] == "ok"


@pytest.fixture
def gpus(monkeypatch):
    """Make torch see GPUs of the given compute capabilities."""
    import torch

    def see(*capabilities):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU of {capabilities[index]}")

    return see


def test_each_gpu_is_told_with_its_target_and_what_it_would_run(examine, use, gpus):
    use()
    gpus((9, 0), (8, 0))
    code, found = examine()
    assert "GPU 1: GPU of (8, 0) of compute capability 8.0, target sm_80" in found["device"][1]
    for target in (HOST_ARCH, "sm_90a", "sm_80"):
        assert f"chunk_kda on {target}" in found
    _, says, _ = found["chunk_kda on sm_80"]
    assert "smxx/chunk_scan__bf16_k128 (compiled on its first use; bf16, K = V = 128; smxx is the best family" in says


def test_gpu_without_a_target_is_broken(examine, no_cuda, gpus):
    gpus((7, 0))
    code, found = examine()
    assert code == 1 and found["device"][0] == "broken" and "has no target here" in found["device"][1]


def test_choice_is_explained_and_a_refusal_too(monkeypatch):
    found = doctor_verb.attention_finding(HOST_ARCH)
    assert found.status == "ok" and "cpu/chunk_scan__bf16_k128 (" in found.says
    assert f"cpu is the best family of {HOST_ARCH}" in found.says and "bf16x3_hw64 by default" in found.says
    monkeypatch.setenv("CAKE_KDA_JIT_FAMILY", "smxx")
    found = doctor_verb.attention_finding(HOST_ARCH)
    assert found.status == "warning" and "CAKE_KDA_JIT_FAMILY" in found.do
    assert f"chunk_scan: none, because family 'smxx' cannot run on {HOST_ARCH}; it has cpu" in found.says
    monkeypatch.setenv("CAKE_KDA_JIT_DISABLE", "1")
    monkeypatch.setenv("CAKE_KDA_JIT_FAMILY", "cpu")
    assert "not built, and compiling is disabled" in doctor_verb.attention_finding(HOST_ARCH).says


def test_malformed_settings_are_all_named(cli, monkeypatch):
    monkeypatch.setenv("CAKE_KDA_JIT_JOBS", "auto")
    monkeypatch.setenv("CAKE_KDA_JIT_DISABLE", "yes")
    code, out, _ = cli("doctor")
    assert code == 1 and "CAKE_KDA_JIT_JOBS='auto'" in out and "CAKE_KDA_JIT_DISABLE='yes'" in out
    assert out.splitlines()[-1] == "2 broken"


def test_ignored_variables_and_missing_directories_are_told(examine, monkeypatch, no_cuda):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    code, found = examine()
    status, says, _ = found["environment"]
    assert code == 0 and status == "warning" and "NVCC_APPEND_FLAGS=-G is ignored" in says
    monkeypatch.delenv("NVCC_APPEND_FLAGS")
    monkeypatch.setenv("CAKE_KDA_JIT_PREBUILT", "/no/such/place")
    code, found = examine()
    assert code == 0 and "names /no/such/place, which is no directory" in found["environment"][1]


def test_toolchain_list(cli, use, toolkit, monkeypatch):
    first, second = use(), toolkit("newer", "13.5")
    monkeypatch.setattr(discover, "USUAL_CUDA", str(second.root))
    code, out, _ = cli("toolchain", "list", "--json")
    rows = {row["place"].partition("=")[0]: row for row in json.loads(out)["nvcc"]}
    assert code == 0 and rows["CUDA_HOME"]["used"] and rows["CUDA_HOME"]["unknown"] == ["sm_107a"]
    other = rows[f"{second.root}/bin"]
    assert (other["used"], other["version"], other["unknown"]) == (False, "13.5.99", [])
    code, out, _ = cli("toolchain", "list")
    assert f"* CUDA_HOME={first.root}: nvcc 13.0.99" in out


def test_toolchain_list_without_any(cli, no_cuda):
    code, out, _ = cli("toolchain", "list")
    assert code == 1 and "PATH: none" in out


def test_toolchain_install(cli, monkeypatch, toolkit, tmp_path, cache_dir):
    code, out, _ = cli("toolchain", "install", "--dry-run", "--json")
    assert code == 0 and json.loads(out)["directory"] == str(cache_dir / "toolchains" / "cuda-13.5")
    made = toolkit("wheel", "13.5")

    def install(packages, target):
        shutil.copytree(made.root, target / "nvidia" / "cu13")

    monkeypatch.setattr(pip_toolchain, "_run_pip", install)
    code, out, _ = cli("toolchain", "install")
    assert code == 0 and "nvcc 13.5.99 at " + str(cache_dir) in out and "sm_107a" in out
    assert not [name for name in os.listdir(cache_dir / "toolchains") if name.startswith(".")]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["toolchain", "install", "--version", "12.8"], "accepted: X.Y from 13.0"),
        (["toolchain", "list", "--version", "13.5"], "belong to `toolchain install`"),
        (["toolchain"], "action"),
    ],
)
def test_wrong_use(cli, argv, words):
    code, _, err = cli(*argv)
    assert code == 2 and words in err
