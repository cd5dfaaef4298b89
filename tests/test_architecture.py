"""The layers: a lower module never imports a higher one, and third-party imports stand only where they may."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "cake_kda_jit"

# First match wins. A module's layer; `reference` stands aside and imports nothing of ours.
LAYERS = (
    (0, ("errors", "config", "paths", "arch")),
    (1, ("record", "programs", "catalog")),
    (2, ("codegen",)),
    (3, ("compiler",)),
    (4, ("runtime",)),
    (6, ("ops.api", "layers", "fla", "")),
    (5, ("ops", "cp")),
    (7, ("cli", "bench", "demo", "__main__")),
)
# Where a third-party package may be imported, at module level or inside a function.
THIRD_PARTY = {
    "jinja2": ("codegen.environment",),
    "fcntl": ("compiler",),
    "rich": ("cli",),
    "ninja": ("compiler.ninja", "compiler.toolchain"),
    "subprocess": ("compiler.toolchain", "compiler.ninja", "bench.first_call"),
    "ctypes": ("runtime",),
    "torch": ("runtime", "ops", "cp", "layers", "fla", "cli", "bench", "demo", "reference"),
    "matplotlib": ("cli", "bench", "demo", "cp.plot"),
}
TORCH_FREE = (
    *("ops.pack", "ops.problem", "ops.select"),
    *("cp.explain", "cp.layouts", "cp.partition", "cp.plot"),
    *("cp.agreement", "cp.halo", "cp.options", "cp.plan", "cp.schedule", "cp.spans"),
)


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found.append((".".join(part for part in parts if part != "__init__"), path))
    return found


def is_within(module: str, homes: tuple[str, ...]) -> bool:
    return any(module == home or (home and module.startswith(home + ".")) for home in homes)


def layer_of(module: str) -> int | None:
    for layer, homes in LAYERS:
        if is_within(module, homes):
            return layer
    return None


def absolute_name(module: str, is_package: bool, node: ast.ImportFrom) -> str | None:
    """The imported module relative to the package, or None if it is not ours."""
    if node.level == 0:
        name = node.module or ""
        return name.removeprefix("cake_kda_jit").lstrip(".") if name.split(".")[0] == "cake_kda_jit" else None
    parts = module.split(".") if module else []
    keep = len(parts) - node.level + (1 if is_package else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def imports(module: str, path: Path, *, module_level: bool) -> list[tuple[bool, str, int]]:
    """(is ours, name, line) of each import; with ``module_level`` only those that run when the module is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    is_package = path.name == "__init__.py"
    inner = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner |= {id(child) for child in ast.walk(node) if child is not node}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            inner |= {id(child) for statement in node.body for child in ast.walk(statement)}
    found = []
    for node in ast.walk(tree):
        if module_level and id(node) in inner:
            continue
        if isinstance(node, ast.Import):
            found += [(False, alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            ours = absolute_name(module, is_package, node)
            if ours is None:
                found.append((False, node.module or "", node.lineno))
                continue
            for alias in node.names:
                inner_module = f"{ours}.{alias.name}".lstrip(".")
                known = {name for name, _ in modules()}
                found.append((True, inner_module if inner_module in known else ours, node.lineno))
    return found


MODULES = modules()


@pytest.mark.parametrize("module, path", MODULES, ids=[name or "__init__" for name, _ in MODULES])
def test_layers(module, path):
    layer = layer_of(module)
    if is_within(module, ("reference",)):
        assert not [
            name
            for ours, name, _ in imports(module, path, module_level=False)
            if ours and not is_within(name, ("reference",))
        ]
        return
    assert layer is not None, f"{module} has no layer: give it one in LAYERS and in docs/architecture.md"
    for ours, name, line in imports(module, path, module_level=True):
        if ours and not is_within(name, ("reference",)):
            assert layer_of(name) <= layer, f"{path.name}:{line}: layer {layer} imports {name} of {layer_of(name)}"
    if is_within(module, ("ops",)):
        assert not [
            name for ours, name, _ in imports(module, path, module_level=False) if ours and is_within(name, ("cp",))
        ], "cp imports ops, never back"


@pytest.mark.parametrize("module, path", MODULES, ids=[name or "__init__" for name, _ in MODULES])
def test_third_party_imports(module, path):
    for ours, name, line in imports(module, path, module_level=False):
        package = name.split(".")[0]
        if not ours and package in THIRD_PARTY:
            assert is_within(module, THIRD_PARTY[package]), f"{path.name}:{line} imports {package}"
    if is_within(module, TORCH_FREE):
        assert not [name for ours, name, _ in imports(module, path, module_level=True) if name.split(".")[0] == "torch"]


def test_environment_is_read_in_config_only():
    for module, path in MODULES:
        text = path.read_text(encoding="utf-8")
        if module != "config":
            assert "os.environ" not in text and "getenv" not in text, f"{path.name} reads the environment"


def test_import_is_light():
    code = (
        "import sys, cake_kda_jit, cake_kda_jit.cli\n"
        "cake_kda_jit.registry().shipped()\n"
        "heavy = {'torch', 'jinja2', 'ninja', 'rich', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
