"""Installs plugins for a test: into a folder on `sys.path`, without pip, gone after the test."""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from modelrunner.plugin_manager import forget

TREES = Path(__file__).parent


class PluginSite:
    """A folder that works like a small site-packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules_before = set(sys.modules)
        folder.mkdir(parents=True, exist_ok=True)

    def install(self, *names: str) -> None:
        """Install source trees that lie beside this file."""
        for name in names:
            tree = TREES / name
            project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
            for module in tree.glob("*.py"):
                shutil.copy(module, self.folder)
            self.metadata(name, project["version"], project["entry-points"]["modelrunner"])

    def write(self, name: str, source: str, *, version: str = "1.0", entry_point: str = "main") -> None:
        """Install a distribution of one module, whose name is `name` with underscores."""
        module = name.replace("-", "_")
        (self.folder / f"{module}.py").write_text(source)
        self.metadata(name, version, {entry_point: module})

    def metadata(self, name: str, version: str, entry_points: Mapping[str, str]) -> None:
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{key} = {value}" for key, value in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[modelrunner]", *lines, ""]))
        self.refresh()

    def refresh(self) -> None:
        """Let the next manager look again."""
        forget()

    def close(self) -> None:
        """Drop the modules that came from this folder."""
        for name in set(sys.modules) - self.modules_before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(self.folder)):
                del sys.modules[name]
        self.refresh()
