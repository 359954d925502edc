"""Host work follows what changes, not how many rows run: a steady step costs the same Python calls at 16 and at 512 rows."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from modelrunner import OutputKind, SamplingParams
from modelrunner.testing import Driver, P, mixed, scripted

STEPS = 32  # two pages of tokens: every row grows twice
PARAMS = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)


def calls_per_step(rows: int, depth: int, params: SamplingParams = PARAMS) -> float:
    """Python and C calls that the interpreter makes in one steady decode step."""
    driver = Driver(scripted(mixed(), "host-work").engine(rows=512, pages=512 * 12, tokens=2048, depth=depth))
    for k in range(rows):
        driver.add(str(k), P(2 + k % 16, k), params)
    for _ in range(20):  # prompts, first pages, one-time work
        driver.step()
    count = 0

    def on_call(frame: FrameType, kind: str, argument: Any) -> None:
        nonlocal count
        count += kind in ("call", "c_call")

    sys.setprofile(on_call)
    try:
        for _ in range(STEPS):
            assert driver.engine.step() == []
    finally:
        sys.setprofile(None)
    return count / STEPS


def test_python_calls_do_not_grow_with_rows() -> None:
    for depth in (1, 2):
        few, many = calls_per_step(16, depth), calls_per_step(512, depth)
        assert abs(many - few) <= 0.1 * few, f"depth {depth}: {few:.0f} calls a step at 16 rows, {many:.0f} at 512"


def test_the_counter_sees_a_loop_over_rows() -> None:
    """Streaming is allowed to cost per row, so it must show up here; otherwise the test above could not fail."""
    streaming = PARAMS.model_copy(update={"stop": ("never there",)})
    assert calls_per_step(512, 1, streaming) > 2 * calls_per_step(16, 1, streaming)
