"""The table of operations in docs/hooks/kernels.md is what the references say."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from operations_table import PAGE, page_with, table


def test_the_page_has_the_operations_as_they_are() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page_with(text) == text, "run `python -P tests/docs/operations_table.py`"


def test_the_table_tells_of_arguments_results_and_tolerance() -> None:
    lines = table().splitlines()
    assert any(line.startswith("| `rms_norm` | `x`, `weight`, `eps`") and "| `Tensor` | close |" in line for line in lines), lines
    assert any(line.startswith("| `apply_rope` | `q`, `k`, `positions`, `cos_sin` | `tuple[Tensor, Tensor]` | close |") for line in lines)
    assert all(len(line.replace("\\|", "").split("|")) == 7 for line in lines), "a cell holds a bar, or one is missing"
