"""B29: a prompt that was wholly in the prefix cache left no token to compute, and the attention call failed."""

from __future__ import annotations

from typing import Any

import pytest
from draft_world import PATTERNS, drafted

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, Subject, assert_same, dense

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


DRAFTERS: dict[str, tuple[Subject, dict[str, Any]]] = {
    "alone": (dense(), {}),
    "drafts": (drafted(PATTERNS["first right"]), {"drafter": "script", "drafts": 3}),
    "ngram": (dense(), {"drafter": "ngram", "drafts": 3}),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_that_is_wholly_in_the_cache(depth: int, drafter: str, device: str) -> None:
    subject, speculation = DRAFTERS[drafter]
    driver = Driver(subject.engine(depth=depth, device=device, **speculation))
    probe = EngineProbe(driver)
    probe.poison_freed_pages()

    def run(**prompts: list[int]) -> dict[str, int]:
        for name, prompt in prompts.items():
            driver.add(name, prompt, PARAMS)
        driver.finish()
        for name, prompt in prompts.items():
            assert_same(dense(), prompt, PARAMS, driver.result(name))
        return {name: driver.final(name).num_cached_tokens for name in prompts}

    assert run(cold=P(32, 1)) == {"cold": 0}
    for cached in run(twin1=P(32, 1), twin2=P(32, 1)).values():
        assert 16 <= cached <= 31
    assert 32 <= run(longer=P(48, 1))["longer"] <= 47
    assert run(block=P(16, 1))["block"] <= 15
    assert run(block_and_one=P(17, 1)) == {"block_and_one": 16}
    assert run(single=P(1, 1)) == {"single": 0}
    probe.assert_clean()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_cold_twins_at_the_same_time(drafter: str, device: str) -> None:
    subject, speculation = DRAFTERS[drafter]
    driver = Driver(subject.engine(depth=2, tokens=16, device=device, **speculation))
    for name in ("a", "b"):
        driver.add(name, P(32, 1), PARAMS)
    driver.finish()
    for name in ("a", "b"):
        assert_same(dense(), P(32, 1), PARAMS, driver.result(name))
    EngineProbe(driver).assert_clean()
