"""B41: items larger than the encoder's arena, or two that did not fit together, were tried again for ever."""

from __future__ import annotations

from typing import Any

import pytest
from mm_world import GREEDY, Made, assert_expected, engine, made
from tiny_mm import PLACEHOLDER, SEPARATOR, embeddings_of

from modelrunner.errors import RequestError
from modelrunner.testing import Driver, EngineProbe

MAX_IDLE = 50


def finish(driver: Driver, chunks: int, outputs: int = 12) -> None:
    """To the end, in few steps, and never long without one."""
    committed, idle = 0, 0
    while driver.engine.has_unfinished():
        driver.step()
        steps = driver.engine.scheduler.stats.steps
        idle = idle + 1 if steps == committed else 0
        committed = steps
        assert idle < MAX_IDLE, "nothing is scheduled any more"
    assert committed <= 3 * chunks + outputs
    EngineProbe(driver).assert_clean()


def test_an_image_larger_than_the_arena_is_refused() -> None:
    driver = engine(arena=64, tokens=64)
    with pytest.raises(RequestError, match=r"80 embeddings.*has 64 \(setting media\.arena_tokens\)"):
        driver.add("a", made((5, (8, 10), 5)).prompt(), GREEDY)
    one = made((5, (8, 8), 5))
    driver.add("b", one.prompt(), GREEDY)
    finish(driver, 2)
    assert_expected(one, driver.result("b"))


@pytest.mark.parametrize("between", [0, 1, 9])
@pytest.mark.parametrize("tokens", [64, 16])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("drafter", [False, True])
def test_two_images_that_do_not_fit_together(between: int, tokens: int, depth: int, drafter: bool) -> None:
    """Also one right behind the other, where a drafter that looks one token ahead would need both at once."""
    from tests.model_states.drafters.engines import head

    more = {"speculation": {"drafter": "eagle", "num_tokens": 3, "model": head("eagle")}} if drafter else {}
    driver = engine(arena=64, more=more, tokens=tokens, depth=depth, device_seed=between)
    one = made((5, (4, 10), *([between] if between else []), (5, 8), 5))
    driver.add("a", one.prompt(), GREEDY)
    finish(driver, (90 + between) // tokens + 1)
    assert driver.engine.media.num_encoded == 2  # type: ignore[attr-defined]
    assert_expected(one, driver.result("a"))


@pytest.mark.parametrize("depth", [1, 2])
def test_several_requests_that_do_not_fit_together(depth: int) -> None:
    """Four requests of two images each in an arena that holds one and a half, beside one of text."""
    driver = engine(arena=64, tokens=32, depth=depth, rows=3, pages=40)
    requests = [made((5 + i, (4, 10), 3, (5, 8), 4), i) for i in range(4)] + [made((30,))]
    for i, one in enumerate(requests):
        driver.add(str(i), one.prompt(), GREEDY)
    finish(driver, 5 * 4, 5 * 12)
    for i, one in enumerate(requests):
        assert_expected(one, driver.result(str(i)))


def test_without_chunks_all_items_must_fit_together() -> None:
    driver = engine(arena=64, chunked=False)
    with pytest.raises(RequestError, match=r"80 embeddings of all of its items together.*has 64"):
        driver.add("a", made((5, (4, 10), 3, (5, 8), 5)).prompt(), GREEDY)
    requests = [made((5, (4, 6), 3, (5, 8), 4), i) for i in range(3)]
    for i, one in enumerate(requests):
        driver.add(str(i), one.prompt(), GREEDY)
    finish(driver, 3, 36)
    for i, one in enumerate(requests):
        assert_expected(one, driver.result(str(i)))


def test_an_item_with_separators_is_counted_by_its_embeddings() -> None:
    """60 embeddings over 70 tokens, in an arena of 64."""
    driver = engine(arena=64, tokens=64)
    one = made((5, (10, 6), 5))
    driver.add("a", one.prompt(mm_processor_kwargs={"separated": True}), GREEDY)
    finish(driver, 2)
    ids = list(driver.final("a").prompt_token_ids)
    assert (ids.count(PLACEHOLDER), ids.count(SEPARATOR), len(ids)) == (60, 10, 80)
    want = separated_tokens(one, ids)
    assert list(driver.result("a").token_ids)[: len(want)] == want


def separated_tokens(one: Made, ids: list[int]) -> list[int]:
    """The output by plain torch, whose image of several runs is several images of one row each, up to a near-tie."""
    import tiny_mm

    vectors = embeddings_of(one.pictures[0])
    rows: Any = [type("Row", (), {"height": tiny_mm.SIDE, "width": 6 * tiny_mm.SIDE, "vectors": part})() for part in vectors.split(6)]
    original = tiny_mm.embeddings_of
    tiny_mm.embeddings_of = lambda picture, seed=1: picture.vectors
    try:
        tokens, gaps = tiny_mm.greedy(ids, rows)
    finally:
        tiny_mm.embeddings_of = original
    near = next((i for i, gap in enumerate(gaps) if gap < 1e-4), len(tokens))
    return tokens[:near]
