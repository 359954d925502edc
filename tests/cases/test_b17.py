"""B17: options that work alone failed in pairs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from modelrunner import CompletionOutput, SamplingParams
from modelrunner.errors import RequestError
from modelrunner.request import Request
from modelrunner.testing import Driver, EngineProbe, P, ScriptDrafterPlugin, dense, ref

PROMPT, TOKENS = P(20, 3), 12
# One plain value each. What goes to `add` beside the parameters stands under "add".
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.9},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 12},
    "min_p": {"min_p": 0.02},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "bad_words": {"bad_words": [(50, 51), (198,)]},
    "logit_bias": {"logit_bias": {40: 3.0, 41: -3.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(30, 90))},
    "seed": {"seed": 11},
    "logprobs": {"logprobs": 4},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "stop": {"stop": ("q", "OO")},
    "include_stop": {"stop": ("q", "OO"), "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": (35, 60)},
    "min_tokens": {"min_tokens": 5},
    "ignore_eos": {"ignore_eos": True},
    "detokenize": {"detokenize": False},
    "salt": {"add": {"cache_salt": "a"}},
    "priority": {"add": {"priority": 3}},
    "stream": {"output_kind": "delta"},
    "n": {"n": 2, "temperature": 0.7},
}
REFUSED = {("stop", "detokenize"), ("include_stop", "detokenize")}  # naming both


def half_right(request: Request) -> list[int]:
    """What the plain greedy request says, of which a sampled or edited one shares some tokens: every other one is another."""
    output = ref(dense(), PROMPT, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)).token_ids
    return [token + place % 2 for place, token in enumerate(output)]


ALTERNATING = replace(dense(), plugins=(*dense().plugins, ScriptDrafterPlugin(half_right)))


def merged(pair: tuple[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    values: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.0}
    more: dict[str, Any] = {}
    for name in pair:
        given = dict(OPTIONS[name])
        more |= given.pop("add", {})
        values |= given
    return values, more


def check(driver: Driver, name: str, params: SamplingParams) -> None:
    outputs = driver.outputs[name]
    joined = params.output_kind == "delta"
    for index in range(params.n):
        check_choice(name, params, [choice for output in outputs for choice in output.outputs if choice.index == index], joined)
    prompts = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    if params.prompt_logprobs is None:
        assert not prompts
    else:
        assert len(prompts) == (1 if joined else len(outputs))
        assert [None if each is None else next(iter(each)) for each in prompts[-1]] == [None, *PROMPT[1:]]


def check_choice(name: str, params: SamplingParams, parts: list[CompletionOutput], joined: bool) -> None:
    ids = [token for part in parts for token in part.token_ids] if joined else list(parts[-1].token_ids)
    text = "".join(part.text for part in parts) if joined else parts[-1].text
    logprobs = [found for part in parts for found in part.logprobs or ()] if joined else parts[-1].logprobs or ()
    assert parts[-1].finish_reason in ("stop", "length"), (name, parts[-1].stop_reason)
    assert 1 <= len(ids) <= TOKENS
    assert len(ids) >= params.min_tokens
    assert params.detokenize or text == ""
    assert len(logprobs) == (len(ids) if params.logprobs is not None else 0), name
    for found, token in zip(logprobs, ids, strict=bool(logprobs)):
        assert next(iter(found)) == token
        assert params.logprobs is not None
        assert params.logprobs <= len(found) <= params.logprobs + 1
        assert all(given.logprob <= 0 and math.isfinite(given.logprob) for given in found.values())
    if params.allowed_token_ids:
        assert set(ids) <= set(params.allowed_token_ids)
    assert 198 not in ids or not params.bad_words


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_every_pair_ends_normally_or_is_refused(drafter: str | None) -> None:
    driver = Driver(dense().engine(depth=2, tokens=48, rows=16, device="deferred_cpu", policy="priority", drafter=drafter))
    pairs = list(combinations(OPTIONS, 2))
    asked: dict[str, SamplingParams] = {}
    for pair in pairs:
        values, more = merged(pair)
        if pair in REFUSED:
            with pytest.raises(RequestError, match=r"stop: .*detokenize"):
                SamplingParams(**values)
            continue
        asked[" and ".join(pair)] = params = SamplingParams(**values)
        driver.add(" and ".join(pair), PROMPT, params, **more)
    while driver.engine.has_unfinished():
        driver.receive(driver.engine.step())
    for name, params in asked.items():
        check(driver, name, params)
    assert len(asked) + len(REFUSED) == len(pairs) == 253
    EngineProbe(driver).assert_clean()


def test_pairs_give_the_same_tokens_with_and_without_drafts() -> None:
    """Of seeded requests, each pair of options: a drafter that is right now and then changes none."""
    plain, drafting = (Driver(each.engine(rows=16, **more)) for each, more in ((dense(), {}), (ALTERNATING, {"drafter": "script"})))
    asked = [pair for pair in combinations(OPTIONS, 2) if pair not in REFUSED]
    for driver in (plain, drafting):
        for pair in asked:
            values, more = merged(pair)
            driver.add(" and ".join(pair), PROMPT, SamplingParams(**({"seed": 5} | values | {"output_kind": "final_only"})), **more)
        driver.finish()
    for pair in asked:
        one, other = (driver.final(" and ".join(pair)).outputs for driver in (plain, drafting))
        for a, b in zip(one, other, strict=True):
            assert (list(a.token_ids), a.text, a.finish_reason, a.stop_reason) == (
                list(b.token_ids),
                b.text,
                b.finish_reason,
                b.stop_reason,
            )
    stats = drafting.engine.scheduler.stats
    assert 0 < stats.num_accepted < stats.num_drafted


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs", "salt", "priority"])
def test_what_only_reports_changes_no_token(name: str) -> None:
    """Beside each other option: greedy, or drawn from the same seed."""
    driver = Driver(dense().engine(depth=2, rows=16, device="deferred_cpu"))
    for other in OPTIONS:
        for label, pair in (("alone", (other, other)), ("too", (name, other))):
            values, more = merged(pair)
            params = SamplingParams(**({"seed": 5} | values | {"output_kind": "final_only"}))
            driver.add(f"{other} {label}", PROMPT, params, **more)
    while driver.engine.has_unfinished():
        driver.receive(driver.engine.step())
    for other in OPTIONS:
        alone, both = driver.result(f"{other} alone"), driver.result(f"{other} too")
        assert (list(alone.token_ids), alone.text) == (list(both.token_ids), both.text), other
        assert (alone.finish_reason, alone.stop_reason) == (both.finish_reason, both.stop_reason)
