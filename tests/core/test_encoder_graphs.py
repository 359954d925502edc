"""Graphs of encodings: what is captured, when it is replayed, and that embeddings are those of an eager encoder."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from mm_world import GREEDY, assert_expected, engine, made

from modelrunner.errors import PluginWarning
from modelrunner.testing import Driver, EngineProbe


def start(**media: Any) -> Driver:
    return engine(200, media={"encoder_tokens": 30, **media}, rows=3, prefix=False, captures=True)


def graphs_of(driver: Driver) -> Any:
    return driver.engine.assembly.media.encoder.graphs  # type: ignore[union-attr]


def encode(driver: Driver, size: tuple[int, int], seeds: Any) -> None:
    for seed in seeds:
        one = made((3, size, 4), seed)
        name = f"{size}-{seed}"
        driver.add(name, one.prompt(), GREEDY)
        driver.finish()
        assert_expected(one, driver.result(name))


def test_a_size_is_captured_when_it_comes_again() -> None:
    driver = start()
    graphs = graphs_of(driver)
    before = graphs.num_captured
    runs = watched(driver)
    encode(driver, (4, 6), range(1))
    assert (graphs.num_captured - before, len(runs)) == (0, 1)
    encode(driver, (4, 6), range(1, 5))
    assert graphs.num_captured - before == 1
    assert len(runs) == 5, "each replay encodes"
    encode(driver, (6, 4), range(1))
    assert graphs.num_captured - before == 1, "another shape has no part in it"
    EngineProbe(driver).assert_clean()


def watched(driver: Driver) -> list[int]:
    """How many items each call of `encode` had, also those of replays."""
    state, calls = driver.engine.assembly.state, list[int]()
    encode = state.encode

    def spy(items: Any, out: Any) -> None:
        calls.append(len(items))
        encode(items, out)

    state.encode = spy  # type: ignore[method-assign]
    return calls


def test_large_items_and_many_together_run_eagerly() -> None:
    driver = start(graph_tokens=20, encoder_tokens=200)
    graphs = graphs_of(driver)
    before = graphs.num_captured
    encode(driver, (4, 6), range(3))
    assert graphs.num_captured == before, "24 embeddings are more than graph_tokens"
    calls = watched(driver)
    many = [made((2, (2, 3), 1, (2, 3), 1, (2, 3), 1, (2, 3), 1, (2, 3), 2), seed) for seed in range(3)]
    for number, one in enumerate(many):
        driver.add(str(number), one.prompt(), GREEDY)
        driver.finish()
        assert_expected(one, driver.result(str(number)))
    assert 5 in calls, "five items were not encoded in one pass"
    assert graphs.num_captured == before


@pytest.mark.parametrize("media", [{"graph_tokens": 0}, {}])
def test_none_where_none_are_wanted(media: Any) -> None:
    driver = start(**media) if media else engine(200, rows=3, prefix=False)
    assert graphs_of(driver) is None
    encode(driver, (4, 6), range(3))


def test_an_encoder_that_cannot_be_captured_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = start()

    def refuse(work: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(driver.engine.assembly.device, "capture_side", refuse)
    with pytest.warns(PluginWarning, match=r"TinyState.encode cannot be captured .* RuntimeError: planted"):
        encode(driver, (4, 6), range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode(driver, (2, 6), range(3))
    EngineProbe(driver).assert_clean()


def test_the_graphs_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelrunner.encoder_graphs.MOST_GRAPHS", 2)
    driver = start()
    graphs = graphs_of(driver)
    sizes = [(2, 3), (3, 3), (2, 5)]
    for size in sizes:
        encode(driver, size, range(2))
    captured = graphs.num_captured
    assert all(len(kept) == 2 for kept in graphs._graphs.values())
    encode(driver, (2, 5), range(2, 4))
    encode(driver, (3, 3), range(2, 4))
    assert graphs.num_captured == captured
    encode(driver, (2, 3), range(2, 4))
    assert graphs.num_captured == captured + 1
