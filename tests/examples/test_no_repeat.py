"""The example of a logits processor, installed by pip into a folder of its own: found by its entry point, and put through the suite."""

from __future__ import annotations

from pathlib import Path

import pytest
from package_site import installed, listed, passed

SOURCE = Path(__file__).resolve().parents[2] / "docs/examples/no_repeat"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(SOURCE, tmp_path_factory.mktemp("no_repeat"))


def test_found_by_its_entry_point(site: Path) -> None:
    assert "modelrunner-no-repeat" in listed(site)


def test_passes_the_suite(site: Path) -> None:
    assert "12 passed" in passed(SOURCE / "test_no_repeat.py", site)
