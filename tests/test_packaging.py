"""One package, three ways to install it: a checkout, an editable install, a wheel. Each finds its templates."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE = (
    "import json, pathlib, sys\n"
    "from cake_kda_jit import paths, registry, render\n"
    "record = registry().get('transfer_walk', 'bf16x3_hw64', 'cpu')\n"
    "print(json.dumps([str(paths.data_dir()), render(record, 'x86_64_v3').digest,"
    " paths.manifest_path(shipped=True).exists(), paths.manifest_path(shipped=False).exists()]))\n"
)


def found_in(path: Path, cwd: Path) -> list:
    import json

    code = f"import sys; sys.path.insert(0, {str(path)!r})\n" + CODE
    run = subprocess.run([sys.executable, "-c", code], cwd=cwd, check=True, capture_output=True, text=True, timeout=60)
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: pip install -e '.[test]'")
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    [path] = out.glob("*.whl")
    return path


def test_wheel_carries_templates_and_manifests_once(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    templates = {str(path.relative_to(ROOT)) for path in (ROOT / "templates").rglob("*") if path.is_file()}
    assert {f"cake_kda_jit/_data/{name}" for name in templates} <= set(names)
    assert {"cake_kda_jit/_data/build.json", "cake_kda_jit/_data/build.test.json", "cake_kda_jit/py.typed"} <= set(
        names
    )
    assert not [name for name in names if name.startswith(("templates/", "tests/", "docs/"))]
    assert len(names) == len(set(names))


def test_a_wheel_and_the_checkout_render_the_same_bytes(wheel, tmp_path):
    installed = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(installed)
    from_wheel, from_checkout = found_in(installed, tmp_path), found_in(ROOT, tmp_path)
    assert from_wheel[0] == str(installed / "cake_kda_jit" / "_data")
    assert from_checkout[0] == str(ROOT)
    assert from_wheel[1:] == from_checkout[1:] and all(from_wheel[2:])
