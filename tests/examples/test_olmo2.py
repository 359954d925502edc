"""The OLMo 2 example, installed by pip into a folder of its own: found by its entry point, chosen, and put through the suite."""

from __future__ import annotations

from pathlib import Path

import pytest
from package_site import installed, listed, passed, run

SOURCE = Path(__file__).resolve().parents[2] / "docs/examples/olmo2"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(SOURCE, tmp_path_factory.mktemp("olmo2"))


def test_it_is_small() -> None:
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    assert len(lines) == 3
    assert sum(lines.values()) < 150, lines


def test_found_by_its_entry_point(site: Path) -> None:
    assert "modelrunner-olmo2" in listed(site)
    assert "modelrunner-olmo2" not in listed()


def test_wins_over_the_fallback(site: Path, tmp_path: Path) -> None:
    """The fallback for whatever transformers knows bids too; a family's own plugin is the better fit.

    The command itself fails at the end, for want of a tokenizer."""
    (tmp_path / "config.json").write_text('{"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}')
    done = run("modelrunner.cli", "explain", str(tmp_path), "--model.load_format", "dummy", path=site)
    assert "modelrunner:transformers offers transformers (fallback)" in done.stdout
    assert "winner: olmo2 of modelrunner-olmo2:olmo2" in done.stdout


@pytest.mark.slow
def test_passes_the_suite(site: Path) -> None:
    assert " passed" in passed(SOURCE / "test_olmo2.py", site)
