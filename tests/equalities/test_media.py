"""Requests with images give what plain torch says, whatever the engine does: chunks, company, depth, cache, preemption, a small arena."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from mm_world import GREEDY, assert_expected, engine, made
from tiny_mm import logits_of

from modelrunner import SamplingParams, StructuredOutputsParams
from modelrunner.testing import EngineProbe

SIZES = ((1, 1), (1, 7), (3, 5), (4, 6), (8, 4), (6, 6))
SEEDS = range(12)
NGRAM: dict[str, Any] = {"speculation": {"drafter": "ngram", "num_tokens": 3}}


def parts_of(draw: random.Random) -> tuple[Any, ...]:
    """Text, then images and text in turn: up to three images, some of them side by side."""
    parts: list[Any] = [draw.randint(1, 20)]
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        parts.append(draw.choice(SIZES))
        if draw.random() < 0.7:
            parts.append(draw.randint(1, 15))
    if not isinstance(parts[-1], int) and draw.random() < 0.7:
        parts.append(draw.randint(1, 9))  # else the last token of the prompt is one of an image
    return tuple(parts)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_runs(seed: int) -> None:
    """Requests come, are preempted and aborted while others run; some have the same images."""
    draw = random.Random(seed)
    short = {
        "depth": draw.choice([1, 2, 3]),
        "rows": draw.choice([2, 4, 8]),
        "tokens": draw.choice([5, 8, 16, 33, 512]),
        "pages": draw.choice([14, 30, 64]),
        "prefix": draw.random() < 0.6,
        "captures": draw.random() < 0.5,
        "device_seed": seed,
        "run_probability": draw.choice([0.1, 0.5, 0.8]),
    }
    more: dict[str, Any] = {"graphs": {"bucket_tokens": (16, 64)}} if draw.random() < 0.5 else {}
    driver = engine(draw.choice([36, 40, 64, 200]), more | (NGRAM if seed % 2 else {}), **short)
    probe = EngineProbe(driver)
    requests = [made(parts_of(draw), draw.randint(0, 2)) for _ in range(7)]
    requests += draw.sample(requests, 2)
    aborted = set()
    for number, one in enumerate(requests):
        driver.add(str(number), one.prompt(), GREEDY)
        for _ in range(draw.randint(0, 4)):
            driver.step()
        if draw.random() < 0.25:
            driver.receive(driver.engine.drain())
            driver.engine.scheduler.preempt(str(draw.randint(0, number)))
        if draw.random() < 0.1:
            aborted.add(number)
            driver.engine.abort(str(number))
    driver.finish(4000)
    for number, one in enumerate(requests):
        if number not in aborted or driver.result(str(number)).finish_reason != "abort":
            assert_expected(one, driver.result(str(number)))
    probe.assert_clean()


def test_the_random_runs_contain_what_they_are_about() -> None:
    draws = [parts_of(random.Random(seed)) for seed in range(60)]
    images = [[part for part in parts if not isinstance(part, int)] for parts in draws]
    assert {len(each) for each in images} == {0, 1, 2, 3}
    assert any(not isinstance(parts[-1], int) for parts in draws)
    assert any(not isinstance(a, int) and not isinstance(b, int) for parts in draws for a, b in itertools.pairwise(parts))


@pytest.mark.parametrize("tokens", [1, 2, 3, 7])
def test_the_smallest_chunks(tokens: int) -> None:
    driver = engine(tokens=tokens)
    one = made((2, (3, 5), 1, (1, 1), (1, 7)))
    driver.add("a", one.prompt(), GREEDY)
    driver.finish()
    assert_expected(one, driver.result("a"))
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("tokens", [7, 64])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("captures", [False, True])
def test_drafts_beside_images(tokens: int, depth: int, captures: bool) -> None:
    """A drafter that finds what it proposes: greedy outputs run in circles. Prompts with images come while others draft."""
    driver = engine(40, NGRAM, tokens=tokens, depth=depth, captures=captures, rows=4)
    long = GREEDY.model_copy(update={"max_tokens": 60})
    many = [made((5 + i, (4, 6), 3, (1, 7), 4 + i), i) for i in range(4)]
    for number, one in enumerate(many):
        driver.add(str(number), one.prompt(), long)
        for _ in range(6):
            driver.step()
    driver.finish()
    for number, one in enumerate(many):
        assert_expected(one, driver.result(str(number)))
    stats = driver.engine.scheduler.stats
    assert sum(stats.accepted_at) > 5, (stats.drafted_at, stats.accepted_at)
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("buckets", [(), (8, 16, 64)])
def test_bodies_with_media_are_captured_and_replayed(buckets: tuple[int, ...]) -> None:
    """Steps with media run as graphs of their own kind, and steps of text beside them as theirs."""
    driver = engine(tokens=64, captures=True, more={"graphs": {"bucket_tokens": buckets}} if buckets else None)
    one = made((5, (4, 6), 6))
    for turn in range(3):
        driver.add(f"a{turn}", made((5, (4, 6), 6), turn).prompt(), GREEDY)
        driver.add(f"t{turn}", made((20,), turn).prompt(), GREEDY)
        driver.finish()
        assert_expected(made((5, (4, 6), 6), turn), driver.result(f"a{turn}"))
        assert_expected(made((20,), turn), driver.result(f"t{turn}"))
    from modelrunner.batch import Feature

    bodies = {key.features for key in driver.engine.runner.graphs.captured if key.part == "body"}
    assert bodies == {Feature.GREEDY, Feature.MEDIA}
    assert all(not key.features & Feature.MEDIA for key in driver.engine.runner.graphs.captured if key.part != "body")
    assert len(one.full) == 35


def test_steps_of_text_read_nothing_of_media() -> None:
    """Neither a copy nor an operation: their plans name no media, and their bodies are those of a model of text."""
    driver = engine()
    plans: list[Any] = []
    launch = driver.engine.runner.launch

    def watched(plan: Any) -> Any:
        plans.append(plan)
        return launch(plan)

    driver.engine.runner.launch = watched  # type: ignore[method-assign]
    placed = []
    ops: Any = driver.engine.runner.parts.ops
    place = ops.place_media
    ops.__dict__["place_media"] = lambda *arguments: (placed.append(1), place(*arguments))
    driver.add("t", made((20,)).prompt(), GREEDY)
    driver.finish()
    assert not placed
    assert [plan for plan in plans if plan.media is not None] == []
    plans.clear()
    driver.add("a", made((5, (4, 6), 6)).prompt(), GREEDY)
    driver.finish()
    with_media = [plan for plan in plans if plan.media is not None]
    assert len(with_media) == len(placed)
    assert 1 <= len(with_media) <= 2, "the text before the image may be computed while that is encoded"
    assert len(plans) == 11 + len(with_media)


def test_log_probs_of_a_prompt_with_an_image() -> None:
    """Of the tokens around it, which depend on what it shows; in chunks that cut it."""
    driver = engine(tokens=16)
    one = made((5, (4, 6), 6, (1, 7), 4))
    driver.add("a", one.prompt(), GREEDY.model_copy(update={"prompt_logprobs": 0}))
    driver.finish()
    assert_expected(one, driver.result("a"))
    found = driver.final("a").prompt_logprobs
    assert found is not None
    want = logits_of(one.full, one.pictures)[0].log_softmax(-1)
    for place in range(1, len(one.full)):
        entry = found[place]
        assert entry is not None
        assert abs(entry[one.full[place]].logprob - float(want[place - 1, one.full[place]])) < 1e-3


def test_a_grammar_and_an_image() -> None:
    """A request waits for both; held rows and rows that wait for images do not get into each other's way."""
    pytest.importorskip("xgrammar")
    driver = engine(40, tokens=16, rows=3, prefix=False)
    params = SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(choice=["yes", "no way"]))
    for number in range(4):
        driver.add(f"guided{number}", made((5 + number, (4, 6), 4), number).prompt(), params)
        driver.add(f"free{number}", made((5 + number, (4, 6), 4), number).prompt(), GREEDY)
    driver.finish()
    for number in range(4):
        text = driver.result(f"guided{number}").text.lstrip("\ufffd")  # a prompt of any bytes may end within a character
        assert text in ("yes", "no way")
        assert_expected(made((5 + number, (4, 6), 4), number), driver.result(f"free{number}"))
    EngineProbe(driver).assert_clean()


def test_an_engine_that_sleeps_encodes_and_goes_on() -> None:
    driver = engine(64, tokens=16)
    one = made((5, (4, 6), 6, (8, 4), 4))
    driver.add("a", one.prompt(), GREEDY)
    for _ in range(3):
        driver.step()
    driver.engine.sleep()
    for _ in range(5):
        driver.step()
    driver.engine.wake_up()
    driver.finish()
    assert_expected(one, driver.result("a"))
    EngineProbe(driver).assert_clean()
