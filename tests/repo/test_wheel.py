"""What a user installs: every source file of the tree is in the wheel, and every entry point leads somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import modelrunner

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"core": "modelrunner"} | {folder: f"modelrunner/{folder}" for folder in ("kernels", "model_states", "plugins")}
EXPECTED = re.compile(r"modelrunner/.*\.(py|typed|html|tmpl)$|modelrunner-[^/]*\.dist-info/")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def copy_tree(to: Path) -> Path:
    """The sources apart from the checkout, where a stale `build` folder could slip files into the wheel."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    return to


def build_wheel(tree: Path, to: Path) -> Path:
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(to)!r})"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = to.glob("*.whl")
    return wheel


def missing_from(wheel: Path, tree: Path) -> list[str]:
    """Source files of `tree` that the wheel lacks."""
    sources = set()
    for folder, package in FOLDERS.items():
        found = [*(tree / folder).rglob("*.py"), *(tree / folder).rglob("*.tmpl")]
        sources |= {f"{package}/{path.relative_to(tree / folder).as_posix()}" for path in found}
    return sorted(sources - set(zipfile.ZipFile(wheel).namelist()))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(copy_tree(tmp_path_factory.mktemp("tree")), tmp_path_factory.mktemp("dist"))


def test_every_source_file_is_in_the_wheel(wheel: Path) -> None:
    assert missing_from(wheel, ROOT) == [], "name the package in [tool.setuptools] packages of pyproject.toml"


def test_a_package_missing_from_the_list_is_found(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    (tree / "kernels/planted").mkdir()
    (tree / "kernels/planted/__init__.py").touch()
    (tmp_path / "dist").mkdir()
    assert missing_from(build_wheel(tree, tmp_path / "dist"), tree) == ["modelrunner/kernels/planted/__init__.py"]


def test_nothing_else_is_in_the_wheel(wheel: Path) -> None:
    strangers = [name for name in zipfile.ZipFile(wheel).namelist() if not EXPECTED.match(name)]
    assert strangers == []


def test_types_and_license_travel(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "modelrunner/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    (metadata,) = [name for name in names if name.endswith("METADATA")]
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert f"Version: {modelrunner.__version__}\n" in text
    assert "License-Expression: Apache-2.0" in text


def test_every_folder_with_code_is_a_package() -> None:
    """A folder without `__init__.py` imports as a namespace when editable, and is not packaged."""
    bare = [str(path.parent) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if not (path.parent / "__init__.py").exists()]
    assert bare == []


def test_entry_points_lead_to_modules_of_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    targets = [*PROJECT["project"]["entry-points"]["modelrunner"].values(), *PROJECT["project"]["scripts"].values()]
    paths = [target.partition(":")[0].replace(".", "/") for target in targets]
    assert [path for path in paths if not {f"{path}.py", f"{path}/__init__.py"} & names] == []


def test_installed_entry_points_are_those_of_the_project() -> None:
    """An editable install keeps the entry points of the day it was made."""
    from importlib.metadata import distribution

    installed = {e.name: e.value for e in distribution("modelrunner").entry_points if e.group == "modelrunner"}
    assert installed == PROJECT["project"]["entry-points"]["modelrunner"], "run `make` again, or pip install -e '.[dev]'"
