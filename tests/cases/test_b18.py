"""B18: when chunks of prompts, whose sample is thrown away, or accepted drafts shared a step, log-probs were taken from the wrong rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from draft_world import PATTERNS, drafted

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, assert_same, dense, ref

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


ASKED = [(P(10, 1), 0), (P(25, 2), 1), (P(40, 3), 5), (P(55, 4), 20), (P(70, 5), None)]


def check(driver: Driver, params: Sequence[SamplingParams]) -> None:
    """Send the requests two steps apart; the log-probs are the reference's, at every output token."""
    probe = EngineProbe(driver)
    for i, (prompt, _) in enumerate(ASKED):
        driver.add(str(i), prompt, params[i])
        driver.step()
        driver.step()
    driver.finish()
    for i, (prompt, number) in enumerate(ASKED):
        result, want = driver.result(str(i)), ref(dense(), prompt, params[i])
        assert_same(dense(), prompt, params[i], result)
        if number is None:
            assert result.logprobs is None
            continue
        assert result.logprobs is not None
        assert want.logprobs is not None
        assert len(result.logprobs) == len(result.token_ids) == 20
        for token, found, other in zip(result.token_ids, result.logprobs, want.logprobs, strict=True):
            assert len(found) - max(number, 1) in ((0, 1) if params[i].temperature else (0,))  # greedy: the sampled token is the likeliest
            assert (next(iter(found)), list(found)) == (token, list(other))
            for each, given in found.items():
                assert given.logprob == pytest.approx(other[each].logprob, abs=1e-4)
                assert given.rank == other[each].rank
    probe.assert_clean()


def wishes(**more: object) -> list[SamplingParams]:
    return [PARAMS.model_copy(update={"logprobs": number, **more}) for _, number in ASKED]


def test_rows_line_up_with_chunks(device: str) -> None:
    check(Driver(dense().engine(depth=2, tokens=24, mixed_tokens=24, device=device)), wishes())


@pytest.mark.parametrize("captures", [False, True], ids=["", "graphs"])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("pattern", ["right", "first right"])
def test_rows_line_up_with_drafts(pattern: str, temperature: float, captures: bool, device: str) -> None:
    """Of three drafts none, one, two, three are kept, over and over; or as they hold."""
    subject = drafted(PATTERNS[pattern], (0, 1, 2, 3) if pattern == "right" else ())
    graphs = {"captures": True} if captures and device == "deferred_cpu" else {}
    driver = Driver(subject.engine(depth=2, tokens=24, mixed_tokens=24, device=device, drafter="script", drafts=3, **graphs))
    check(driver, wishes(temperature=temperature, seed=4))
    stats = driver.engine.scheduler.stats
    assert stats.num_accepted > 20
    assert (stats.num_drafted > stats.num_accepted) is (pattern != "right")


def test_processed_logprobs_line_up_with_drafts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a token was drawn from, at its own place: only the kept ones have a chance, and they add up to 1."""
    monkeypatch.setenv("MODELRUNNER_SAMPLER__LOGPROBS_MODE", "processed")
    driver = Driver(drafted(PATTERNS["first right"]).engine(depth=2, device=device, drafter="script", drafts=3))
    params = PARAMS.model_copy(update={"temperature": 1.0, "seed": 3, "top_k": 3, "logprobs": 5, "repetition_penalty": 1.4})
    driver.add("a", ASKED[2][0], params)
    driver.finish()
    result = driver.result("a")
    assert list(result.token_ids) == list(ref(dense(), ASKED[2][0], params.model_copy(update={"logprobs": None})).token_ids)
    assert driver.engine.scheduler.stats.num_accepted > 0
    assert result.logprobs is not None
    for found in result.logprobs:
        chances = [math.exp(each.logprob) for each in found.values()]
        assert sum(chance > 0 for chance in chances) == 3
        assert sum(chances) == pytest.approx(1.0, abs=1e-5)
