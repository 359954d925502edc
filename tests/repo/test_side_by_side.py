"""The script that runs a GPU's tests in processes: it runs those that are marked, tells failures, and stops what takes too long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "gpu/side_by_side.py"
MARKED = "import pytest, time\npytestmark = pytest.mark.gpu\n"


@pytest.mark.slow
def test_marked_tests_are_run_and_told(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\naddopts = -q\n")
    (tmp_path / "test_good.py").write_text(f"{MARKED}@pytest.mark.parametrize('n', range(11))\ndef test_it(n): pass\n")
    (tmp_path / "test_rings.py").write_text(f"{MARKED}@pytest.mark.parametrize('n', range(10))\ndef test_it(n): pass\n")
    (tmp_path / "test_bad.py").write_text(f"{MARKED}def test_it(): assert 1 == 2\n")
    (tmp_path / "test_alone.py").write_text(f"{MARKED}def test_it(): time.sleep(1e4)\n")
    (tmp_path / "test_other.py").write_text("def test_it(): raise AssertionError('it is not marked')\n")
    command = [sys.executable, "-P", SCRIPT, "--seconds", "30", "--alone", "test_alone.py", "."]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 1
    assert "test_good.py (1 of 2): 9 passed\n" in ran.stdout
    assert "test_rings.py: 10 passed\n" in ran.stdout
    assert "assert 1 == 2" in ran.stdout
    assert "test_bad.py, test_good.py (2 of 2): 1 failed, 2 passed\n" in ran.stdout
    lines = ran.stdout.splitlines()
    assert lines[-2].endswith("test_alone.py: nothing, then stopped")
    assert lines[-1].startswith("1 failed, 21 passed in ")
    assert lines[-1].endswith("; stopped: test_alone.py")
    assert "not marked" not in ran.stdout
