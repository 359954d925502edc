"""When something is encoded: pauses for those who decode, and only for them."""

from __future__ import annotations

from typing import Any

import pytest
from mm_world import GREEDY, assert_expected, engine, made

from modelrunner.testing import EngineProbe


class Clock:
    """Seconds that pass as the test says. Each encoding takes two."""

    def __init__(self, driver: Any) -> None:
        self.now = 100.0
        self.begun: list[float] = []
        media = driver.engine.media
        media._clock = self
        start = media._start

        def watched(items: Any, lines: Any) -> Any:
            self.begun.append(self.now)
            event = start(items, lines)
            self.now += 2.0
            return event

        media._start = watched

    def __call__(self) -> float:
        return self.now


def waits(share: float, decoding: bool) -> list[float]:
    """Seconds between the beginnings of encodings, of three images in an arena with room for all; a step takes half a second."""
    driver = engine(200, media={"encoder_share": share, "encoder_tokens": 24}, device="cpu", rows=2, prefix=False)
    clock = Clock(driver)
    long = GREEDY.model_copy(update={"max_tokens": 80})
    if decoding:
        driver.add("text", made((9,), 5).prompt(), long)
        driver.step()
    many = [made((5, (4, 6), 6), seed) for seed in range(3)]
    for number, one in enumerate(many):
        driver.add(str(number), one.prompt(), GREEDY)
    while driver.engine.has_unfinished():
        driver.step()
        clock.now += 0.5
    for number, one in enumerate(many):
        assert_expected(one, driver.result(str(number)))
    EngineProbe(driver).assert_clean()
    return [after - before for before, after in zip(clock.begun, clock.begun[1:], strict=False)]


@pytest.mark.parametrize(("share", "least"), [(0.5, 4.0), (0.25, 8.0)])
def test_encoding_pauses_while_others_decode(share: float, least: float) -> None:
    found = waits(share, decoding=True)
    assert len(found) == 2
    assert all(least <= gap <= least + 2 for gap in found), found


@pytest.mark.parametrize(("share", "decoding"), [(0.25, False), (1.0, True)])
def test_nothing_pauses_without_need(share: float, decoding: bool) -> None:
    """A request without a row is nobody who decodes; and the full share has no pauses."""
    found = waits(share, decoding)
    assert len(found) == 2
    assert found[0] <= 3.0, found
