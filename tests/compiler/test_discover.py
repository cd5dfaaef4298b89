"""Where compilers are looked for, and what is refused before anything is compiled."""

from __future__ import annotations

import platform
import sys

import pytest

from cake_kda_jit import errors
from cake_kda_jit.arch import get_arch
from cake_kda_jit.compiler import check, discover, lookup, pip_toolchain
from cake_kda_jit.compiler.build import build
from cake_kda_jit.compiler.flags import compile_flags
from cake_kda_jit.compiler.toolchain import Toolchain

from .test_build import run_tiny
from .tiny import HOST_ARCH, tiny_record
from .toolkit import FakeToolkit

CUDA = tiny_record("smxx")


@pytest.fixture
def places(no_cuda, toolkit, monkeypatch, tmp_path, cache_dir):
    """A toolkit in each place where one is looked for, in the stated order; returns (release, hide it)."""
    named, own, home, on_path, usual = (toolkit(f"t{n}", f"13.{n}") for n in range(5))
    FakeToolkit(tmp_path / "own" / "cuda-13.1" / "nvidia" / "cu13", own.library, "13.1")
    FakeToolkit(cache_dir / "toolchains" / "cuda-13.5" / "nvidia" / "cu13", own.library, "13.5")
    FakeToolkit(cache_dir / "toolchains" / "cuda-13.10" / "nvidia" / "cu13", own.library, "13.10")
    monkeypatch.setenv("CAKE_KDA_JIT_NVCC", str(named.nvcc))
    monkeypatch.setenv("CAKE_KDA_JIT_TOOLCHAIN_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("CUDA_HOME", str(home.root))
    monkeypatch.setenv("PATH", str(on_path.nvcc.parent), prepend=":")
    monkeypatch.setattr(discover, "USUAL_CUDA", str(usual.root))
    return [
        ("13.0.99", lambda: monkeypatch.delenv("CAKE_KDA_JIT_NVCC")),
        ("13.1.99", lambda: monkeypatch.delenv("CAKE_KDA_JIT_TOOLCHAIN_DIR")),
        ("13.2.99", lambda: monkeypatch.delenv("CUDA_HOME")),
        ("13.3.99", on_path.nvcc.unlink),
        ("13.4.99", lambda: monkeypatch.setattr(discover, "USUAL_CUDA", str(tmp_path / "none"))),
        ("13.10.99", lambda: None),
    ]


def test_order_of_the_places(places):
    for release, hide in places:
        host = discover.find_host_compiler()
        assert discover.find_nvcc(host).identity["version"] == release
        used = [tool for _, tool, _ in discover.all_nvccs(host) if tool][0]
        assert used.identity["version"] == release, "the list says the same"
        hide()


def test_every_place_is_listed_with_its_reason(places):
    places[0][1]()
    rows = discover.all_nvccs(discover.find_host_compiler())
    reasons = [place.reason.partition(":")[0].partition("=")[0] for place, _, _ in rows]
    assert reasons == ["CAKE_KDA_JIT_TOOLCHAIN_DIR", "CUDA_HOME", "PATH", discover.USUAL_CUDA + "/bin"]


def test_no_nvcc_names_the_places_and_the_install_command(no_cuda, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    with pytest.raises(errors.ToolchainNotFound) as caught:
        discover.find_toolchain(get_arch("sm_80"))
    for words in (str(tmp_path / "cuda"), discover.USUAL_CUDA, "PATH", "toolchains", "toolchain install"):
        assert words in str(caught.value)


@pytest.mark.parametrize("variable", ["CAKE_KDA_JIT_NVCC", "PATH"])
def test_broken_nvcc_is_an_error_and_no_other_is_taken(toolkit, monkeypatch, no_cuda, variable):
    broken, good = toolkit("broken"), toolkit("good")
    broken.nvcc.write_text("#!/bin/sh\necho 'exec: /opt/cuda/bin/nvcc: not found' >&2\nexit 127\n")
    monkeypatch.setattr(discover, "USUAL_CUDA", str(good.root))
    if variable == "PATH":
        monkeypatch.setenv("PATH", str(broken.nvcc.parent), prepend=":")
    else:
        monkeypatch.setenv(variable, str(broken.nvcc))
    with pytest.raises(errors.ToolchainNotFound, match="broken/bin/nvcc does not run: exec: .* not found"):
        build(CUDA, "sm_80")


@pytest.fixture
def use(toolkit, monkeypatch):
    """Make a fake toolkit and name its nvcc."""

    def make(*arguments, **options):
        found = toolkit(*arguments, **options)
        monkeypatch.setenv("CAKE_KDA_JIT_NVCC", str(found.nvcc))
        return found

    return make


def test_fake_toolkit_builds(data, use):
    fake = use()
    artifact = build(CUDA, "sm_90a")
    assert artifact.origin == "built" and len(fake.calls) == 1
    assert run_tiny(artifact.library, 1.0) == [2.0, 4.0, 6.0]
    assert artifact.provenance["toolchain"]["cuda"]["cudart"] == 13000


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"headers": "13.0"}, "nvcc 13.5.99 .* would compile with headers of CUDA 13.0 .CUDART_VERSION 13000"),
        ({"headers": "12.8"}, "headers of CUDA 12.8"),
        ({"ptxas": "13.0"}, "would run ptxas 13.0"),
    ],
)
def test_parts_of_two_releases_are_refused_before_compiling(data, use, changes, words):
    fake = use(release="13.5", **changes)
    with pytest.raises(errors.ToolchainMismatch, match=words) as caught:
        build(CUDA, "sm_90a")
    assert "one release" in caught.value.hint and "toolchain install --version 13.5" in caught.value.hint
    assert fake.calls == []


def test_host_compiler_newer_than_the_toolkit_accepts(data, use, fake_cxx, monkeypatch):
    fake = use(max_gcc=15)
    fake_cxx(dM="#define __GNUC__ 16")
    with pytest.raises(errors.HostCompilerUnsupported, match="is gcc 16; nvcc 13.0.99 .* gcc up to 15") as caught:
        build(CUDA, "sm_90a")
    assert "g++-15" in caught.value.hint and "CAKE_KDA_JIT_CXX" in caught.value.hint
    assert fake.calls == []
    assert build(tiny_record(), HOST_ARCH).origin == "built", "the cpu family does not ask nvcc"
    monkeypatch.setenv("CAKE_KDA_JIT_EXTRA_FLAGS", "-allow-unsupported-compiler")
    assert build(CUDA, "sm_90a").origin == "built"


@pytest.mark.parametrize("major, accepted", [(15, True), (20, True), (21, False)])
def test_clang_has_its_own_limit(data, use, fake_cxx, major, accepted):
    use(max_gcc=3)
    fake_cxx(dM=f"#define __GNUC__ 4\n#define __clang_major__ {major}")
    if accepted:
        assert build(CUDA, "sm_90a").origin == "built"
    else:
        with pytest.raises(errors.HostCompilerUnsupported, match="clang 21; .* accepts clang up to 20"):
            build(CUDA, "sm_90a")


def test_sm_107a_of_an_old_nvcc_names_one_that_knows_it(data, use, toolkit, monkeypatch, no_cuda):
    fake = use()
    with pytest.raises(errors.UnsupportedArch, match="nvcc 13.0.99 .* does not know sm_107a") as caught:
        build(CUDA, "sm_107a")
    assert "toolchain install --version 13.5" in caught.value.hint
    newer = toolkit("newer", "13.5")
    monkeypatch.delenv("CAKE_KDA_JIT_NVCC")
    monkeypatch.setenv("CUDA_HOME", str(fake.root))
    monkeypatch.setattr(discover, "USUAL_CUDA", str(newer.root))
    with pytest.raises(errors.UnsupportedArch) as caught:
        build(CUDA, "sm_107a")
    assert caught.value.hint == f"nvcc 13.5.99 does: set CAKE_KDA_JIT_NVCC={newer.nvcc}"
    assert fake.calls == newer.calls == []
    monkeypatch.setenv("CAKE_KDA_JIT_NVCC", str(newer.nvcc))
    assert build(CUDA, "sm_107a").origin == "built"


def test_nvccs_own_list_of_targets_counts(data, use):
    fake = use(release="13.9", codes=("sm_80", "sm_90"))
    with pytest.raises(errors.UnsupportedArch, match="does not know sm_100a"):
        build(CUDA, "sm_100a")
    assert fake.calls == [] and build(CUDA, "sm_90a").origin == "built"


def test_another_toolkit_version_is_another_key(data, use):
    keys = set()
    for name, release in (("a", "13.0"), ("b", "13.1"), ("moved/a", "13.0")):
        use(name, release)
        keys.add(build(CUDA, "sm_90a").build_key)
    assert len(keys) == 2, "the same toolkit elsewhere is the same toolkit"


def test_patched_part_of_one_version_is_another_key(data, use):
    fake = use()
    first = build(CUDA, "sm_90a")
    (fake.root / "nvvm" / "bin" / "cicc").write_text("#!/bin/sh\n# patched\n")
    assert build(CUDA, "sm_90a").build_key != first.build_key


def test_toolkit_with_lib_only_is_given_its_library_directory(data, use):
    usual, lib_only = use("usual"), use("lib only", libraries="lib")
    build(CUDA, "sm_90a")
    (call,) = lib_only.calls
    assert f"-L{lib_only.root}/lib" in call and not usual.calls


def test_no_command_line_links_the_driver(data, use, monkeypatch):
    fake = use()
    for arch in ("sm_80", "sm_90a", "sm_100a"):
        build(CUDA, arch)
    assert len(fake.calls) == 3
    assert all("-lcuda" not in call.split() and "-cudart=static" in call.split() for call in fake.calls)


def test_build_without_a_gpu_probes_no_device(data, use, monkeypatch):
    """The target is the argument's; torch, which would be asked for a device, is not even loaded."""
    use()
    monkeypatch.setitem(sys.modules, "torch", None)
    assert [build(CUDA, arch).arch for arch in ("sm_80", "sm_120a")] == ["sm_80", "sm_120a"]


def test_aarch64_has_its_own_flags_and_keys(data, use, quick_cxx, monkeypatch):
    fake = use()
    x86 = build(CUDA, "sm_90a")
    cxx = quick_cxx(name="aarch64-g++", **{"dumpmachine": "aarch64-linux-gnu", "fsyntax-only": ""})
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    found = build(tiny_record(), "aarch64")
    assert "-march=armv8-a" in cxx.calls.read_text() and "-march=armv8-a" in found.provenance["flags"]
    assert found.provenance["toolchain"]["host"]["target"] == "aarch64-linux-gnu"
    with pytest.raises(errors.UnsupportedArch, match="x86_64_v3 is not a target of this machine, which is aarch64"):
        build(tiny_record(), "x86_64_v3")
    arm = build(CUDA, "sm_90a")
    assert arm.source_key == x86.source_key and arm.build_key != x86.build_key
    assert len(fake.calls) == 2, "host code of another processor is another library"
    monkeypatch.setenv("CAKE_KDA_JIT_DISABLE", "1")
    assert build(CUDA, "sm_90a").build_key == arm.build_key, "matched by source, of this processor's kind"


def test_cross_compiler_is_refused(data, fake_cxx):
    fake = fake_cxx(dumpmachine="aarch64-linux-gnu" if HOST_ARCH != "aarch64" else "x86_64-linux-gnu")
    with pytest.raises(errors.UnsupportedArch, match="compiles for"):
        build(tiny_record(), HOST_ARCH)
    assert fake.num_calls == 0


@pytest.mark.parametrize("arch, march", [("x86_64_v3", "-march=x86-64-v3"), ("x86_64", "-march=x86-64"),
                                         ("aarch64", "-march=armv8-a")])  # fmt: skip
def test_cpu_flags_are_exact_and_never_native(arch, march):
    flags = compile_flags(tiny_record(), get_arch(arch), Toolchain(discover.find_host_compiler()))
    assert [flag for flag in flags if "march" in flag] == [march]
    assert "-ffp-contract=off" in flags and not [flag for flag in flags if "fast-math" in flag or "native" in flag]


class TestInstall:
    @pytest.fixture
    def pip(self, monkeypatch, tmp_path, toolkit):
        """A Python whose pip "installs" a fake toolkit, or fails."""

        def make(release="13.5", body="", **options):
            made = toolkit("wheel", release, **options)
            script = tmp_path / "python"
            script.write_text(
                f'#!/bin/sh\nprintf "%s\\n" "$*" >> "{tmp_path}/pip.calls"\n{body}\n'
                'while [ "$1" != --target ]; do shift; done\n'
                f'mkdir -p "$2/nvidia" && cp -r "{made.root}" "$2/nvidia/cu13"\n'
            )
            script.chmod(0o755)
            monkeypatch.setattr(sys, "executable", str(script))
            return tmp_path / "pip.calls"

        return make

    def test_installs_once_and_is_then_found(self, pip, no_cuda, data, cache_dir):
        calls = pip()
        tool = pip_toolchain.install_toolchain()
        assert tool.path == str(cache_dir / "toolchains" / "cuda-13.5" / "nvidia" / "cu13" / "bin" / "nvcc")
        command = calls.read_text()
        for package in ("nvidia-cuda-nvcc==13.5.*", "nvidia-cuda-crt==13.5.*", "nvidia-nvvm==13.5.*",
                        "nvidia-cuda-runtime==13.5.*", "nvidia-cuda-cuobjdump==13.5.*", "nvidia-cuda-nvdisasm==13.5.*",
                        "nvidia-cuda-cccl>=13,<13.6"):  # fmt: skip
            assert package in command.split()
        assert "--target" in command and "--no-deps" in command
        assert pip_toolchain.install_toolchain().path == tool.path
        assert len(calls.read_text().splitlines()) == 1
        assert build(CUDA, "sm_107a").origin == "built", "discovery uses it"
        assert [path.name for path in (cache_dir / "toolchains").iterdir()] == ["cuda-13.5"]

    def test_directory_can_be_named(self, pip, no_cuda, monkeypatch, tmp_path):
        pip("13.2")
        monkeypatch.setenv("CAKE_KDA_JIT_TOOLCHAIN_DIR", str(tmp_path / "tools"))
        assert pip_toolchain.install_toolchain("13.2").path.startswith(str(tmp_path / "tools" / "cuda-13.2"))

    def test_failing_pip_is_told_with_its_own_words(self, pip, no_cuda, cache_dir):
        pip(body="echo 'ERROR: No matching distribution found for nvidia-cuda-nvcc==13.5.*' >&2; exit 1")
        with pytest.raises(errors.ToolchainNotFound, match="pip could not install nvidia-cuda-nvcc") as caught:
            pip_toolchain.install_toolchain()
        assert caught.value.first_error.startswith("ERROR: No matching distribution")
        assert "PIP_INDEX_URL" in caught.value.hint and "pip install" in caught.value.reproduction
        assert not list((cache_dir / "toolchains").iterdir())

    @pytest.mark.parametrize(
        "options, kind, words",
        [
            ({"headers": "13.0"}, errors.ToolchainMismatch, "headers of CUDA 13.0"),
            ({"max_gcc": 3}, errors.HostCompilerUnsupported, "accepts gcc up to 3"),
            ({"body_": "echo 'x.cu(1): error: bad' >&2; exit 1"}, errors.ToolchainMismatch, "does not compile: .*bad"),
        ],
    )
    def test_what_does_not_fit_is_not_left_behind(self, pip, no_cuda, cache_dir, toolkit, options, kind, words):
        body = options.pop("body_", None) if "body_" in options else None
        pip(**({**options, "body": ""} if body is None else {}))
        if body is not None:
            made = toolkit("wheel", "13.5", body=body)
            made.write_nvcc()
        with pytest.raises(kind, match=words):
            pip_toolchain.install_toolchain()
        assert not list((cache_dir / "toolchains").iterdir())

    def test_another_process_that_was_faster_is_used(self, pip, no_cuda, cache_dir, monkeypatch):
        pip()
        real = pip_toolchain._prove

        def prove_late(nvcc, host):
            monkeypatch.setattr(pip_toolchain, "_prove", real)
            pip_toolchain.install_toolchain()
            real(nvcc, host)

        monkeypatch.setattr(pip_toolchain, "_prove", prove_late)
        assert pip_toolchain.install_toolchain().identity["version"] == "13.5.99"
        assert [path.name for path in (cache_dir / "toolchains").iterdir()] == ["cuda-13.5"]

    def test_half_an_installation_is_replaced_by_force(self, pip, no_cuda, cache_dir):
        pip()
        tool = pip_toolchain.install_toolchain()
        (cache_dir / "toolchains" / "cuda-13.5" / "nvidia" / "cu13" / "include" / "crt" / "host_config.h").unlink()
        assert pip_toolchain.install_toolchain(force=True).path == tool.path
        assert (cache_dir / "toolchains" / "cuda-13.5" / "nvidia" / "cu13" / "include" / "crt").is_dir()

    def test_directory_that_cannot_be_written(self, pip, no_cuda, monkeypatch, tmp_path):
        pip()
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("CAKE_KDA_JIT_TOOLCHAIN_DIR", str(tmp_path / "file"))
        with pytest.raises(errors.CacheNotWritable, match="toolchain directory .*file cannot be written"):
            pip_toolchain.install_toolchain()

    @pytest.mark.parametrize("version", ["12.8", "13", "13.5.37", "new", ""])
    def test_versions_that_cannot_be_installed(self, version):
        with pytest.raises(errors.ConfigError, match="accepted: X.Y from 13.0 on"):
            pip_toolchain.requirements(version)

    def test_python_without_pip(self, no_cuda, monkeypatch):
        monkeypatch.setattr(pip_toolchain.importlib.util, "find_spec", lambda name: None)
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        with pytest.raises(errors.ToolchainNotFound, match="has no pip") as caught:
            pip_toolchain.install_toolchain()
        assert "ensurepip" in caught.value.hint


def test_versions_are_checked_again_for_a_hit_by_source(data, use, monkeypatch):
    """What a newer nvcc built is used by an older one's machine, and the reason says so."""
    use("newer", "13.5")
    assert build(CUDA, "sm_107a").origin == "built"
    use("older", "13.0")
    hit = build(CUDA, "sm_107a")
    assert hit.origin == "cache" and "does not know sm_107a" in hit.reason
    with pytest.raises(errors.UnsupportedArch):
        check.check_versions(get_arch("sm_107a"), discover.find_toolchain(get_arch("sm_107a")))
    assert lookup.search(CUDA, "sm_107a").toolchain is None
