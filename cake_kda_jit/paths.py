"""Where templates and manifests are: the only module that knows how the package was installed."""

from __future__ import annotations

from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent


def data_dir() -> Path:
    """Return the directory that holds ``templates/``, ``build.json`` and ``build.test.json``.

    ``cake_kda_jit/_data`` in an installed wheel; the repository root in a checkout or an editable install.
    """
    installed = PACKAGE_DIR / "_data"
    return installed if installed.is_dir() else PACKAGE_DIR.parent


def templates_dir() -> Path:
    """Return the directory of the Jinja templates."""
    return data_dir() / "templates"


def manifest_path(*, shipped: bool) -> Path:
    """Return the path of the manifest of shipped or of test-only records."""
    return data_dir() / ("build.json" if shipped else "build.test.json")
