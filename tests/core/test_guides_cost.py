"""Guides whose matchers are costly: the limit on what one token may take, and what others wait."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from grammar_world import COST, ChoicePlugin, written

from modelrunner import SamplingParams, StructuredOutputsParams
from modelrunner.testing import Driver, EngineProbe, P, Subject, assert_same, dense

PLAIN = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
TEXTS = ["one thing", "another thing", "xyz"]


def choice(*texts: str) -> SamplingParams:
    return SamplingParams(temperature=1, seed=4, max_tokens=30, structured_outputs=StructuredOutputsParams(choice=texts or TEXTS))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    def made(*, token_seconds: float, **short: Any) -> Driver:
        monkeypatch.setenv("MODELRUNNER_GRAMMAR__TOKEN_SECONDS", str(token_seconds))
        return Driver(Subject(dense().model, "guided", (*dense().plugins, ChoicePlugin())).engine(**short))

    return made


@pytest.mark.parametrize("depth", [1, 2])
def test_a_costly_matcher_ends_its_request_after_one_slow_token(make: Callable[..., Driver], depth: int) -> None:
    driver = make(depth=depth, token_seconds=0.02)
    driver.add("plain", P(9, 7), PLAIN)
    driver.add("costly", P(9, 1), choice("ab~" + "c" * 20))
    driver.add("b", P(9, 2), choice())
    driver.finish()
    costly = driver.result("costly")
    assert (costly.finish_reason, written(costly.token_ids)) == ("error", "ab~")
    assert re.search(
        r"structured_outputs\.choice: the grammar is too costly: its matcher took [\d.]+ seconds after 3 output tokens; "
        r"accepted: at most 0\.02 for a token \(setting grammar\.token_seconds\)",
        str(costly.stop_reason),
    )
    assert written(driver.result("b").token_ids) in TEXTS
    assert_same(dense(), P(9, 7), PLAIN, driver.result("plain"))
    EngineProbe(driver).assert_clean()


def test_a_costly_mask_that_completes_an_output_is_no_error(make: Callable[..., Driver]) -> None:
    driver = make(token_seconds=0.02)
    driver.add("a", P(9, 1), choice("ab~"))
    driver.finish()
    assert (driver.result("a").finish_reason, written(driver.result("a").token_ids)) == ("stop", "ab~")


def test_many_costly_rows_do_not_add_up_within_a_turn(make: Callable[..., Driver]) -> None:
    """Each is within the limit; with nothing in flight a turn makes masks for as long as one of them may take, and goes on."""
    driver = make(depth=1, token_seconds=4 * COST)
    driver.add("plain", P(9, 7), PLAIN)
    for i in range(6):
        driver.add(f"r{i}", P(9, i), choice("~abcdef"))
    late = 0
    while not driver.is_finished("plain"):
        driver.step()
        late = max(late, len(driver.engine.guides._late))
    assert late >= 1
    driver.finish()
    assert all(written(driver.result(f"r{i}").token_ids) == "~abcdef" for i in range(6))
    EngineProbe(driver).assert_clean()
