"""The tutorial's package, built from the page, installed by pip into a folder of its own, and put through the suite that ends the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from package_site import PIP, run

PAGE = Path(__file__).resolve().parents[2] / "docs/tutorial.md"
FILE = re.compile(r"^```\w+ file (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page, and in it `site`, where the package is installed."""
    folder = tmp_path_factory.mktemp("tutorial") / "modelrunner-gpt2"
    for name, text in FILE.findall(PAGE.read_text(encoding="utf-8")):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    done = run(*PIP, "--target", str(folder / "site"), str(folder), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_it_is_listed(package: Path) -> None:
    listing = run("modelrunner.cli", "plugins", "--hook", "model_state", cwd=package.parent, path=package / "site")
    assert re.search(r"^modelrunner-gpt2:gpt2 .* loaded ", listing.stdout, re.MULTILINE), listing.stdout + listing.stderr


def test_it_passes_the_suite(package: Path) -> None:
    done = run("pytest", "-q", "-p", "no:cacheprovider", "test_gpt2.py", cwd=package, path=package / "site")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def test_what_newcomers_asked_is_answered() -> None:
    """Padded tokens, tied heads, plain layers, comparing with transformers."""
    text = PAGE.read_text(encoding="utf-8")
    for answer in (
        "`batch.input_ids` 0 and `batch.positions` 0",
        "To tie a head",
        "Plain `torch.nn` layers may be used",
        "**Against transformers**",
    ):
        assert answer in text
