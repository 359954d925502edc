"""All kernels that steps launch are built at start-up, so that no step waits for the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-8b"])
def test_no_step_launches_what_was_not_built(model: str, tmp_path: Path) -> None:
    """On an H200, for dense models of few and of many weights, with prompts of many lengths beside any number of rows that decode."""
    pytest.importorskip("triton")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(FOLDER / "launch_world.py"), str(tmp_path), model]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["mistaken"] == []
    assert told["at_start"] == []
    assert told["late"] == []
    assert told["run"] > 80
    assert sum(told["built"].values()) < 130, f"each takes half a second of a processor: {told['built']}"
