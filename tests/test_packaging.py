"""Guards of the packaging: where `kernels` comes from, what an import loads, what pyproject.toml must name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 has no tomllib")

ROOT = Path(__file__).resolve().parents[1]


def test_every_kernel_folder_is_packaged():
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for folder in (p for p in (ROOT / "kernels").iterdir() if p.is_dir() and p.name != "__pycache__"):
        name = f"sdpa_router.kernels.{folder.name}"
        assert name in tables["packages"]
        assert tables["package-dir"][name] == f"kernels/{folder.name}"


def test_every_package_folder_is_listed():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    for init in (ROOT / "sdpa_router").rglob("__init__.py"):
        assert ".".join(init.parent.relative_to(ROOT).parts) in packages


def test_top_level_kernels_is_not_a_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_kernels_never_resolves_into_the_root_as_a_package(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or not spec.origin.startswith(str(ROOT))


@pytest.mark.parametrize("unwanted", ["triton", "diffusers", "transformers", "rich", "matplotlib"])
def test_import_is_light(unwanted):
    code = f"import sys, sdpa_router; sys.exit({unwanted!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_and_version():
    import sdpa_router

    for name in (
        "scaled_dot_product_attention int8_attention merge_attention classify_mask explain route enable disable "
        "stats reset_stats record is_available UnsupportedError"
    ).split():
        assert callable(getattr(sdpa_router, name)), name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sdpa_router.__version__ == project["version"]
