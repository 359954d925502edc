"""When something is encoded: pauses for those who decode, and only for them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from mm_world import GREEDY, assert_expected, engine, made

from modelrunner.devices.cuda_part import NoParts, part_stream
from modelrunner.devices.cuda_side import Pace
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


def told(driver: Any) -> list[float]:
    """The shares that the device was told, from now on."""
    shares = list[float]()
    media, pace = driver.engine.media, driver.engine.media._pace

    def tell(share: float) -> None:
        shares.append(share)
        pace(share)

    media._pace = tell
    return shares


def world(**more: Any) -> Any:
    return engine(200, media={"encoder_share": 0.5, "encoder_tokens": 24}, prefix=False, **more)


def test_the_device_is_shared_while_text_decodes() -> None:
    """And is the encoder's own again once the text has ended, also in the middle of an encoding."""
    driver = world(rows=4, run_probability=0.02)
    shares = told(driver)
    text = made((9,), 5)
    driver.add("text", text.prompt(), GREEDY)
    many = [made((5, (4, 6), 6), seed) for seed in range(4)]
    for number, one in enumerate(many):
        driver.add(str(number), one.prompt(), GREEDY.model_copy(update={"max_tokens": 3}))
    driver.finish()
    assert shares[:2] == [0.5, 1.0], shares
    assert_expected(text, driver.result("text"))
    EngineProbe(driver).assert_clean()


def test_those_who_brought_media_share_only_with_fewer() -> None:
    """Among requests with images, encoding goes on at full speed while more wait for it than decode."""
    driver = world(rows=8)
    shares = told(driver)
    many = [made((5, (4, 6), 6), seed) for seed in range(6)]
    media, seen = driver.engine.media, list[tuple[int, int, float]]()
    for number, one in enumerate(many):
        driver.add(str(number), one.prompt(), GREEDY.model_copy(update={"max_tokens": 40}))
    while driver.engine.has_unfinished():
        driver.step()
        if media.num_in_flight:
            decoding = driver.engine.scheduler.num_running - len(media._tenancies)
            seen.append((decoding, len(media._waiting) + len(media._tenancies), media._paced))
    assert shares[:1] == [0.5], "nothing was shared, though more decoded than waited"
    assert {paced for decoding, waiting, paced in seen if decoding + 1 < waiting} == {1.0}
    for number, one in enumerate(many):
        assert_expected(one, driver.result(str(number)))
    EngineProbe(driver).assert_clean()


def test_nobody_is_spared_at_the_full_share() -> None:
    driver = engine(200, media={"encoder_share": 1.0, "encoder_tokens": 24}, prefix=False, rows=4)
    shares = told(driver)
    driver.add("text", made((9,), 5).prompt(), GREEDY)
    driver.add("image", made((5, (4, 6), 6), 1).prompt(), GREEDY)
    driver.finish()
    assert shares == []


def test_pauses_keep_the_share_of_the_time() -> None:
    now = [10.0]
    pace = Pace(lambda: now[0])
    assert pace.free
    pace.set(0.25)
    waits = list[float]()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        now[0] += seconds
        return pace.free

    pace._free.wait = wait  # type: ignore[method-assign, assignment]
    for took in (2.0, 0.5):
        now[0] += took
        pace.owe(took)
        pace.rest()
    assert waits == [6.0, 1.5]
    assert pace.rested == 7.5
    pace.owe(2.0)
    now[0] += 4.0  # somebody else's time
    pace.rest()
    assert waits[-1] == 2.0
    now[0] += 50.0
    pace.rest()
    assert len(waits) == 3, "what is owed was waited for"


def test_a_pause_ends_when_nobody_decodes_any_more() -> None:
    pace = Pace()
    pace.set(0.001)
    pace.owe(100.0)
    timer = threading.Timer(0.05, pace.set, (1.0,))
    timer.start()
    begun = time.monotonic()
    pace.rest()
    assert time.monotonic() - begun < 50
    assert pace.rested == 0.0
    timer.join()


def test_the_start_says_how_those_who_decode_are_spared() -> None:
    assert "encoder          pauses while others decode" in str(world(rows=2).engine.assembly.resolved)
    full = engine(200, media={"encoder_share": 1.0}, rows=2)
    assert full.engine.assembly.resolved.encoder == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_nothing_is_parted() -> None:
    with pytest.raises(NoParts, match=r"the driver has no cuDeviceGet: .*libcuda"):
        part_stream(torch.device("cuda", 0), 0.5)
