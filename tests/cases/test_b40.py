"""B40: encoder output was dropped while something still needed it."""

from __future__ import annotations

from typing import Any

import pytest
from mm_world import GREEDY, assert_expected, engine, made

from modelrunner.testing import EngineProbe

PARTS: Any = (5, (4, 6), 6, (4, 6), 7)
ENDS = (5 + 24, 5 + 24 + 6 + 24)


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("captures", [False, True])
def test_chunk_edges_around_an_image_end(edge: int, depth: int, captures: bool) -> None:
    """An arena for one image; a second request has another one at the same time."""
    driver = engine(arena=24, tokens=ENDS[0] + edge, depth=depth, captures=captures, device_seed=7 * depth + edge)
    one, other = made(PARTS), made((3, (6, 4), 9), 1)
    driver.add("a", one.prompt(), GREEDY)
    driver.add("b", other.prompt(), GREEDY)
    driver.finish()
    assert_expected(one, driver.result("a"))
    assert_expected(other, driver.result("b"))
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_image_is_released_once_committed_tokens_are_past_it(depth: int) -> None:
    driver = engine(arena=24, tokens=8, depth=depth)
    probe = EngineProbe(driver)
    arena = driver.engine.media.arena  # type: ignore[attr-defined]
    driver.add("a", made((5, (4, 6), 60)).prompt(), GREEDY)
    seen = set()
    while driver.engine.has_unfinished():
        driver.step()
        if "a" in driver.engine.requests and probe.row_of("a") >= 0:
            past = probe.committed("a") >= ENDS[0]
            seen.add((past, arena.num_owned))
    assert seen <= {(False, 24), (True, 0)}
    assert (True, 0) in seen
    assert (False, 24) in seen


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("moment", ["planned", "launched", "collected", "committed"])
def test_abort_between_encoding_and_use(depth: int, moment: Any) -> None:
    """The lines of the aborted one go to the other only when no step in flight reads them."""
    for steps in range(1, 7):
        driver = engine(arena=24, tokens=8, depth=depth, device_seed=steps, run_probability=0.3)
        probe = EngineProbe(driver)
        one = made((9, (4, 6), 6), 2)
        driver.add("gone", made(PARTS).prompt(), GREEDY)
        driver.add("stays", one.prompt(), GREEDY)
        for _ in range(steps):
            driver.step()
        probe.once(moment, lambda: driver.engine.abort("gone"))  # noqa: B023
        driver.finish()
        assert_expected(one, driver.result("stays"))
        probe.assert_clean()


def test_aborted_before_it_has_a_row() -> None:
    driver = engine(arena=24, run_probability=0.0)
    driver.add("gone", made(PARTS).prompt(), GREEDY)
    driver.engine.media.advance(driver.engine.scheduler)
    assert driver.engine.media.num_in_flight == 1
    driver.engine.abort("gone")
    one = made((9, (4, 6), 6), 2)
    driver.add("stays", one.prompt(), GREEDY)
    driver.finish()
    assert driver.result("gone").finish_reason == "abort"
    assert_expected(one, driver.result("stays"))
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_media_cache_reset_in_mid_run(depth: int) -> None:
    """After every step once: what a row reads stays, everything else is encoded again."""
    for steps in range(12):
        driver = engine(arena=48, tokens=8, depth=depth, prefix=False, device_seed=steps)
        one, again = made(PARTS), made((3, (4, 6), 9), 1)
        driver.add("a", one.prompt(), GREEDY)
        driver.add("b", again.prompt(), GREEDY)
        for _ in range(steps):
            driver.step()
        driver.engine.reset_media_cache()
        driver.add("c", one.prompt(), GREEDY)
        driver.finish()
        for name, which in (("a", one), ("b", again), ("c", one)):
            assert_expected(which, driver.result(name))
        EngineProbe(driver).assert_clean()


def test_new_weights_are_what_later_images_are_encoded_with() -> None:
    from tiny_mm import greedy, weights

    driver = engine(prefix=True)
    one = made(PARTS)
    driver.add("a", one.prompt(), GREEDY)
    driver.finish()
    driver.engine.update_weights(iter(weights(2).items()))
    driver.add("b", one.prompt(), GREEDY)
    driver.finish()
    tokens, gaps = greedy(one.full, one.pictures, seed=2)
    near = next((i for i, gap in enumerate(gaps) if gap < 1e-4), len(tokens))
    assert list(driver.result("b").token_ids)[:near] == tokens[:near]


def test_an_encoder_that_fails_ends_those_who_need_it_alone() -> None:
    driver = engine(arena=300, run_probability=0.1)
    state: Any = driver.engine.assembly.state
    encode = state.encode

    def failing(items: Any, out: Any) -> None:
        if any(item.num_embeddings == 25 for item in items):
            raise MemoryError("planted")
        encode(items, out)

    state.encode = failing
    one = made((9, (4, 6), 6), 2)
    driver.add("bad", made((5, (5, 5), 6)).prompt(), GREEDY)
    driver.step()
    driver.add("good", one.prompt(), GREEDY)
    driver.add("text", made((20,)).prompt(), GREEDY)
    driver.finish()
    assert driver.result("bad").finish_reason == "error"
    assert driver.result("bad").stop_reason == "the encoder failed: MemoryError: planted"
    assert_expected(one, driver.result("good"))
    assert_expected(made((20,)), driver.result("text"))
    EngineProbe(driver).assert_clean()
