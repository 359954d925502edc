"""No case may be forgotten: each of B01 to B62 is tested here, or its line in pending_cases.txt says what it waits for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CASES = [f"B{number:02}" for number in range(1, 63)]
HERE = Path(__file__).parent
LINE = re.compile(r"(?P<case>B\d\d)(\[(?P<part>[^\[\]]+)\])? waits for: \S.*")


def pending_lines() -> list[str]:
    return (HERE.parent / "pending_cases.txt").read_text().splitlines()


def test_lines_are_well_formed_sorted_and_unique() -> None:
    lines = pending_lines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    assert lines == sorted(lines)
    names = [line.split(" waits for:")[0] for line in lines]
    assert len(set(names)) == len(names)
    assert {name[:3] for name in names} <= set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_case_is_tested_or_pending(case: str) -> None:
    """A line without a part means that the whole case waits, so it excludes a test file; a line with a part goes beside one."""
    matches = [match for line in pending_lines() if (match := LINE.fullmatch(line)) and match["case"] == case]
    tested = (HERE / f"test_{case.lower()}.py").exists()
    whole = any(match["part"] is None for match in matches)
    assert tested != whole, f"{case}: test file {'exists' if tested else 'is missing'}, pending as a whole: {whole}"
