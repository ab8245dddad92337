"""The wheel runs the README in an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import rein
from tests.docs.pages import ROOT, python_of


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("rein_rl-*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An environment with the wheel, and with the dependencies of the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin/python"
    options = ["--quiet", "--no-deps", "--no-index"]
    command = [sys.executable, "-m", "pip", "--python", python, "install", *options, str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    site = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    # Python ignores .pth files in folders that a .pth file adds, so the editable rein is not found.
    (Path(site.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    yield python


def run(python: Path, folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), *arguments]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_wheel_has_package_with_type_information(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"rein/__init__.py", "rein/__init__.pyi", "rein/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "examples/"))]


def test_version_is_the_same_in_all_files(wheel: Path) -> None:
    assert wheel.name.startswith(f"rein_rl-{rein.__version__}-")
    assert f"\nversion: {rein.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{rein.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_wheel_runs_readme(python: Path, tmp_path: Path) -> None:
    location = run(python, tmp_path, "-c", "import rein; print(rein.__file__)")
    assert location.startswith(str(python.parents[1]))
    run(python, tmp_path, "-c", python_of(ROOT / "README.md"))


def test_wheel_installs_command_line(python: Path, tmp_path: Path) -> None:
    assert "cartpole" in run(python.with_name("rein"), tmp_path, "list")
