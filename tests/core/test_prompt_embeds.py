"""Prompts of embeddings: those of the model's own table give what the token ids give, however the engine computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from modelrunner import SamplingParams
from modelrunner.errors import RequestError
from modelrunner.request import CompletionOutput
from modelrunner.testing import Driver, EngineProbe, P, dense, ref
from modelrunner.testing.reference import assert_tokens

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=7, max_tokens=12, ignore_eos=True)


def embeddings(prompt: list[int]) -> torch.Tensor:
    """Those of the checkpoint's table: [tokens, 64] float32."""
    return load_file(Path(dense().model) / "model.safetensors")["model.embed_tokens.weight"][prompt]


def engine(arena: int = 300, **short: Any) -> Driver:
    from modelrunner.engine import Engine
    from modelrunner.testing.subjects import options

    subject = dense()
    settings = {"model": {"name": subject.model}, "media": {"prompt_embeds": True, "arena_tokens": arena}}
    return Driver(Engine(settings | options(**{"device": "deferred_cpu", "pages": 64} | short), plugins=subject.plugins))


def add(driver: Driver, name: str, prompt: list[int], params: SamplingParams, **more: Any) -> None:
    driver.engine.add_request(name, {"prompt_embeds": embeddings(prompt)}, params, **more)
    driver.outputs[name] = []


def assert_tokens_of(prompt: list[int], params: SamplingParams, result: CompletionOutput) -> None:
    """Those of the ids. (The text's first bytes may be those that complete a character of a prompt of ids.)"""
    assert_tokens(dense(), prompt, result.token_ids, ref(dense(), prompt, params).token_ids, greedy=params.temperature == 0)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("tokens", [5, 16, 8, 2048])
@pytest.mark.parametrize("captures", [False, True])
def test_they_give_what_the_ids_give(depth: int, tokens: int, captures: bool) -> None:
    """Alone, and beside requests of ids; in one chunk and in many; the arena holds less than all of them."""
    driver = engine(arena=150, depth=depth, tokens=tokens, captures=captures, device_seed=tokens + depth)
    for i in range(3):
        prompt = P(20 + 55 * i, i)
        add(driver, f"embeds{i}", prompt, (GREEDY, SEEDED)[i % 2])
        driver.add(f"ids{i}", prompt, (GREEDY, SEEDED)[i % 2])
    driver.finish()
    for i in range(3):
        for kind in ("embeds", "ids"):
            assert_tokens_of(P(20 + 55 * i, i), (GREEDY, SEEDED)[i % 2], driver.result(f"{kind}{i}"))
    assert driver.engine.media.num_encoded == 1 + 1 + 2  # pieces of 128 tokens at most
    EngineProbe(driver).assert_clean()


def test_equal_embeddings_hit_the_cache_and_others_do_not() -> None:
    driver = engine()
    first, second = P(40, 1), [*P(40, 1)[:20], *P(40, 2)[20:]]
    for name, prompt in (("a", first), ("b", first), ("c", second)):
        add(driver, name, prompt, GREEDY)
        driver.finish()
        assert_tokens_of(prompt, GREEDY, driver.result(name))
    driver.add("ids", first, GREEDY)
    driver.add("zeros", [0] * 40, GREEDY)
    driver.finish()
    cached = {name: driver.final(name).num_cached_tokens for name in driver.outputs}
    assert cached == {"a": 0, "b": 32, "c": 0, "ids": 0, "zeros": 0}
    EngineProbe(driver).assert_clean()


def test_preempted_they_are_put_into_the_arena_again() -> None:
    """The second request takes the arena from the first, which has been preempted in the middle of its prompt and after it."""
    for at in (32, 96, 101):
        driver = engine(arena=128, tokens=32, prefix=False, depth=2)
        probe = EngineProbe(driver)
        add(driver, "a", P(96, 1), GREEDY)
        driver.step_until(lambda probe=probe, at=at: probe.row_of("a") >= 0 and probe.committed("a") >= at)  # type: ignore[misc]
        probe.preempt("a")
        add(driver, "b", P(100, 2), GREEDY, priority=-1)
        driver.finish()
        assert_tokens_of(P(96, 1), GREEDY, driver.result("a"))
        assert_tokens_of(P(100, 2), GREEDY, driver.result("b"))
        probe.assert_clean()


def test_an_aborted_request_gives_its_lines_back() -> None:
    driver = engine(arena=64, tokens=16)
    probe = EngineProbe(driver)
    for moment in ("planned", "launched", "collected", "committed"):
        add(driver, moment, P(60, 3), GREEDY)
        probe.once(moment, lambda name=moment: driver.engine.abort(name))  # type: ignore[misc, arg-type]
        driver.finish()
        assert driver.result(moment).finish_reason == "abort"
    add(driver, "last", P(60, 4), GREEDY)
    driver.finish()
    assert_tokens_of(P(60, 4), GREEDY, driver.result("last"))
    probe.assert_clean()


def test_several_answers_to_one_prompt() -> None:
    driver = engine()
    add(driver, "n", P(40, 1), SEEDED.model_copy(update={"n": 3}))
    driver.finish()
    outputs = driver.final("n").outputs
    assert len({tuple(each.token_ids) for each in outputs}) == 3
    assert_tokens_of(P(40, 1), SEEDED, outputs[0])
    EngineProbe(driver).assert_clean()


def test_without_chunks_the_whole_prompt_waits_for_all_of_its_pieces() -> None:
    driver = engine(arena=160, chunked=False, depth=2)
    add(driver, "a", P(150, 1), GREEDY)
    driver.add("b", P(20, 2), GREEDY)
    driver.finish()
    assert_tokens_of(P(150, 1), GREEDY, driver.result("a"))
    assert_tokens_of(P(20, 2), GREEDY, driver.result("b"))
    with pytest.raises(RequestError, match=r"170 embeddings.*has 160"):
        add(driver, "c", P(170, 1), GREEDY)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, np.float32])
def test_other_types_are_taken(kind: Any) -> None:
    """Rounded to 16 bits the table is another one: what matters is that the engine computes it."""
    driver, rows = engine(), embeddings(P(20, 1))
    given = rows.numpy() if kind is np.float32 else rows.to(kind)
    driver.engine.add_request("a", {"prompt_embeds": given}, GREEDY)
    driver.outputs["a"] = []
    driver.finish()
    assert len(driver.result("a").token_ids) == 12
    if kind is np.float32:
        assert_tokens_of(P(20, 1), GREEDY, driver.result("a"))
    assert list(driver.final("a").prompt_token_ids) == [0] * 20


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (torch.zeros(3, 63), r"float32 of shape \[3, 63\]; accepted: a tensor \[tokens, 64\]"),
        (torch.zeros(64), r"shape \[64\]"),
        (torch.zeros(0, 64), r"shape \[0, 64\]"),
        (torch.zeros(3, 64, dtype=torch.float64), "float64"),
        (torch.zeros(3, 64, dtype=torch.int32), "int32"),
        (torch.full((3, 64), torch.nan), "not finite"),
        ([[0.0] * 64], "got a list"),
        (torch.zeros(256, 64), "256 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(value: Any, match: str) -> None:
    driver = engine()
    with pytest.raises(RequestError, match=match):
        driver.engine.add_request("a", {"prompt_embeds": value}, GREEDY)
    assert not driver.engine.has_unfinished()


def test_they_go_with_some_things_only() -> None:
    driver, rows = engine(), embeddings(P(9, 1))
    with pytest.raises(RequestError, match="'prompt' beside 'prompt_embeds'"):
        driver.engine.add_request("a", {"prompt_embeds": rows, "prompt": "x"}, GREEDY)
    with pytest.raises(RequestError, match="prompt_logprobs"):
        driver.engine.add_request("a", {"prompt_embeds": rows}, GREEDY.model_copy(update={"prompt_logprobs": 1}))
    with pytest.raises(RequestError, match=r"media\.prompt_embeds=true"):
        dense().engine().add_request("a", {"prompt_embeds": rows}, GREEDY)
    with pytest.raises(RequestError, match="takes text only"):
        dense().engine().add_request("a", {"prompt": "x", "multi_modal_data": {"image": [1]}}, GREEDY)
