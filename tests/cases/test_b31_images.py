"""B31: two different images hit each other's cache pages, since their placeholder ids are equal."""

from __future__ import annotations

import numpy as np
from mm_world import GREEDY, Made, assert_expected, engine
from PIL import Image
from tiny_mm import SIDE, greedy

from modelrunner.testing import EngineProbe, P

TEXT_BEFORE = 20


def with_picture(color: tuple[int, int, int], before: int = TEXT_BEFORE) -> Made:
    one = Made((before, (4, 6), 16))
    frame = np.full((4 * SIDE, 6 * SIDE, 3), color, np.uint8)
    one.pictures = [Image.fromarray(frame)]
    return one


def test_images_of_one_size_keep_apart() -> None:
    driver = engine(depth=2)
    red, blue = with_picture((255, 0, 0)), with_picture((0, 0, 255))
    cached, encoded = {}, {}
    for name, one in (("red", red), ("blue", blue), ("again", red)):
        driver.add(name, one.prompt(), GREEDY)
        driver.finish()
        tokens, gaps = greedy(one.full, one.pictures)
        near = next((i for i, gap in enumerate(gaps) if gap < 1e-4), len(tokens))
        assert list(driver.result(name).token_ids)[:near] == tokens[:near]
        cached[name] = driver.final(name).num_cached_tokens
        encoded[name] = driver.engine.media.num_encoded
    assert cached == {"red": 0, "blue": 16, "again": 48}, "the page of 16 tokens before the image is the same"
    assert encoded == {"red": 1, "blue": 2, "again": 2}
    assert greedy(red.full, red.pictures)[0] != greedy(blue.full, blue.pictures)[0]
    EngineProbe(driver).assert_clean()


def test_an_image_that_lies_elsewhere_in_its_pages_keeps_apart() -> None:
    """Runs of the same ids, with the same image one token further on: the tokens of the first page differ, those of the second do not."""
    driver = engine()
    first = with_picture((9, 99, 200), 8)
    longer = Made((7, (4, 6), 17))
    longer.pictures = first.pictures
    longer.short = [*P(7, 0), 330, *first.short[9:], 5]
    longer.full = [*P(7, 0), *[330] * 24, *first.full[32:], 5]
    for name, one in (("a", first), ("b", longer)):
        driver.add(name, one.prompt(), GREEDY)
        driver.finish()
        tokens, gaps = greedy(one.full, one.pictures)
        near = next((i for i, gap in enumerate(gaps) if gap < 1e-4), len(tokens))
        assert list(driver.result(name).token_ids)[:near] == tokens[:near]
    assert driver.final("b").num_cached_tokens == 0


def test_salts_still_keep_apart() -> None:
    driver = engine()
    one = Made((8, (4, 6), 16))
    for name, salt in (("a", None), ("b", "x"), ("c", "x")):
        driver.add(name, one.prompt(), GREEDY, cache_salt=salt)
        driver.finish()
        assert_expected(one, driver.result(name))
    assert [driver.final(name).num_cached_tokens for name in "abc"] == [0, 0, 32]
