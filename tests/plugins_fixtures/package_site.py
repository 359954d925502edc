"""Installs a source tree by pip into a folder of its own, and runs what is in it in processes that see that folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().anchor  # away from the checkout
PIP = ("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")


def run(*arguments: str, path: Path | None = None, cwd: Path | str = ROOT) -> subprocess.CompletedProcess[str]:
    """`python -m ...` in a process of its own, with `path` to find packages in."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **({"PYTHONPATH": str(path)} if path else {})}
    return subprocess.run([sys.executable, "-P", "-m", *arguments], cwd=cwd, env=environ, capture_output=True, text=True)


def installed(source: Path, folder: Path) -> Path:
    """The folder `folder/site`, with the package of `source` in it; built from a copy, since a build leaves files behind."""
    tree = shutil.copytree(source, folder / "source", ignore=shutil.ignore_patterns("__pycache__", "build"))
    site = folder / "site"
    done = run(*PIP, "--target", str(site), str(tree))
    assert done.returncode == 0, done.stdout + done.stderr
    return site


def passed(tests: Path, site: Path) -> str:
    """What pytest printed of tests that a package brings, all of which must pass."""
    done = run("pytest", "-c", os.devnull, "--rootdir", str(site.parent), "-p", "no:cacheprovider", "-q", str(tests), path=site)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


def listed(site: Path | None = None) -> str:
    """What `modelrunner plugins` prints."""
    done = run("modelrunner.cli", "plugins", path=site)
    assert done.returncode == 0, done.stderr
    return done.stdout
