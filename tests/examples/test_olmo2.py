"""The OLMo 2 example, installed by pip into a folder of its own: found by its entry point, chosen, and put through the suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "docs/examples/olmo2"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package; built from a copy, since a build leaves files behind."""
    tree = shutil.copytree(SOURCE, tmp_path_factory.mktemp("olmo2") / "source", ignore=shutil.ignore_patterns("__pycache__", "build"))
    target = tree.parent / "site"
    done = run("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target), str(tree))
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m ...` in a process of its own, with `path` to find packages in and away from the checkout."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **({"PYTHONPATH": str(path)} if path else {})}
    return subprocess.run([sys.executable, "-P", "-m", *arguments], cwd=SOURCE.anchor, env=environ, capture_output=True, text=True)


def test_it_is_small() -> None:
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    assert len(lines) == 3
    assert sum(lines.values()) < 150, lines


def test_found_by_its_entry_point(site: Path) -> None:
    listing = run("modelrunner.cli", "plugins", path=site)
    assert listing.returncode == 0, listing.stderr
    assert "modelrunner-olmo2" in listing.stdout
    assert "modelrunner-olmo2" not in run("modelrunner.cli", "plugins").stdout


def test_wins_over_the_fallback(site: Path, tmp_path: Path) -> None:
    """The fallback for whatever transformers knows bids too; a family's own plugin is the better fit.

    The command itself fails at the end, for want of a tokenizer."""
    (tmp_path / "config.json").write_text('{"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}')
    done = run("modelrunner.cli", "explain", str(tmp_path), "--model.load_format", "dummy", path=site)
    assert "modelrunner:transformers offers transformers (fallback)" in done.stdout
    assert "winner: olmo2 of modelrunner-olmo2:olmo2" in done.stdout


@pytest.mark.slow
def test_passes_the_suite(site: Path) -> None:
    tests = str(SOURCE / "test_olmo2.py")
    done = run("pytest", "-c", os.devnull, "--rootdir", str(site.parent), "-p", "no:cacheprovider", "-q", tests, path=site)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
