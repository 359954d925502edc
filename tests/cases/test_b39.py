"""B39: with chunked prefill each chunk got the positions of the whole prompt, or restarted at zero."""

from __future__ import annotations

from typing import Any

import pytest
from mm_world import GREEDY, Positions, assert_expected, engine, expected, made
from tiny_mm import logits_of

from modelrunner.testing import EngineProbe

PARTS = (5, (4, 6), 6, (8, 4), 7)
TEXT = (100,)


def right_positions(parts: Any) -> dict[int, tuple[int, ...]]:
    """Of the prompt and the output but its last token."""
    one = made(parts)
    known = [*one.full, *expected(*one.key, 12)[0][:-1]]
    _, rows = logits_of(known, one.pictures)
    return {i: tuple(rows[:, i].tolist()) for i in range(len(known))}


def test_the_right_ones_are_those_of_the_case() -> None:
    rows = right_positions(PARTS)
    assert rows[4] == (4, 4, 4)
    assert rows[5] == (5, 5, 5)
    assert rows[5 + 23] == (5, 8, 10)
    assert rows[29] == (11, 11, 11)
    assert rows[35] == (17, 17, 17)
    assert rows[35 + 31] == (17, 24, 20)
    assert rows[67] == (25, 25, 25)
    assert rows[74] == (32, 32, 32), "the first output"
    assert right_positions(TEXT)[110] == (110, 110, 110)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("parts", "tokens"), [(PARTS, 2048), (PARTS, 8), (PARTS, 16), (PARTS, 5), (TEXT, 16), (TEXT, 2048)])
def test_positions_by_chunk(parts: Any, tokens: int, depth: int) -> None:
    driver = engine(tokens=tokens, depth=depth, device_seed=depth)
    positions = Positions(driver)
    one = made(parts)
    driver.add("a", one.prompt(), GREEDY)
    driver.finish()
    assert positions.seen == right_positions(parts)
    assert not positions.clashes
    assert_expected(one, driver.result("a"))
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("prefix", [False, True])
def test_preempted_and_resumed(prefix: bool) -> None:
    driver = engine(tokens=16, prefix=prefix)
    positions, probe = Positions(driver), EngineProbe(driver)
    one = made(PARTS)
    driver.add("a", one.prompt(), GREEDY)
    driver.step_until(lambda: driver.num_tokens("a") >= 6)
    probe.preempt("a")
    driver.finish()
    assert driver.final("a").metrics.num_preemptions == 1
    assert positions.seen == right_positions(PARTS)
    assert not positions.clashes
    assert_expected(one, driver.result("a"))
    probe.assert_clean()


def test_a_prefix_hit_that_ends_inside_the_first_image() -> None:
    driver = engine(tokens=16)
    first = made(PARTS)
    other = type(first)(PARTS)
    other.short = [*first.short[:6], *[token + 1 for token in first.short[6:12]], *first.short[12:]]
    other.full = [*first.full[:29], *[token + 1 for token in first.full[29:35]], *first.full[35:]]
    driver.add("a", other.prompt(), GREEDY)
    driver.finish()
    positions = Positions(driver)
    driver.add("b", first.prompt(), GREEDY)
    driver.finish()
    assert driver.final("b").num_cached_tokens == 16
    assert positions.seen == {i: three for i, three in right_positions(PARTS).items() if i >= 16}
    assert_expected(first, driver.result("b"))
    EngineProbe(driver).assert_clean()
