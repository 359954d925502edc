"""B36: at the end of a chunk that was not the last, the drafter was fed the model's guess instead of the known next token.

The heads are loud ones: an entry of their caches made from another token changes what they propose."""

from __future__ import annotations

from typing import Any

import pytest

from modelrunner import SamplingParams
from modelrunner.testing import EngineProbe, P, assert_same
from tests.model_states.drafters.engines import Watch, head, start, subject

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPT = P(50, 1)
SHIFTED = ("eagle", "eagle3", "mtp")


def run(
    kind: str, device: str, *, preempt: bool = False, before: list[int] | None = None, prompt: list[int] = PROMPT, **short: Any
) -> Watch:
    """Run the prompt, perhaps after another one; returns what the drafter saw and said of it."""
    driver = start(kind, head(kind, loud=kind in SHIFTED), device=device, page_size=16, more={"graphs": {"eager": True}}, **short)
    probe = EngineProbe(driver)
    probe.poison_freed_pages()
    if before is not None:
        driver.add("before", before, PARAMS)
        driver.finish()
    watch = Watch.of(driver)
    driver.add("a", prompt, PARAMS)
    if preempt:
        driver.step_until(lambda: probe.known("a") >= len(prompt) + 10)
        probe.preempt("a")
    driver.finish()
    assert_same(subject(), prompt, PARAMS, driver.result("a"))
    assert probe.counters().preemptions == int(preempt)
    watch.check_inputs()
    assert watch.check_proposals(kind, loud=kind in SHIFTED) > 15
    if before is not None:
        assert driver.final("a").num_cached_tokens > 0
    return watch


@pytest.mark.parametrize("kind", [*SHIFTED, "draft_model"])
def test_proposals_are_the_same_however_the_prompt_was_read(kind: str, device: str) -> None:
    whole = run(kind, device)
    runs = {
        "chunks of 16": run(kind, device, tokens=16),
        "chunks of 7": run(kind, device, tokens=7, rows=4),
        "preempted": run(kind, device, tokens=16, preempt=True, prefix=False),
        "preempted, own pages found": run(kind, device, tokens=16, preempt=True),
        "32 cached": run(kind, device, before=[*PROMPT[:33], 99, 98]),
        "48 cached": run(kind, device, before=PROMPT),
    }
    for name, watch in runs.items():
        same = {known: found for known, found in watch.proposals.items() if known in whole.proposals}
        assert len(same) >= min(len(watch.proposals), len(whole.proposals)) - 3, name
        for known, found in same.items():
            assert set(found) == set(whole.proposals[known]), name


@pytest.mark.parametrize("kind", SHIFTED)
@pytest.mark.parametrize("cached", [32, 48])
def test_a_prefix_is_found_though_another_token_followed_it(kind: str, cached: int, device: str) -> None:
    """What a page holds for its last position was made from the token after the page, which differs between the two requests."""
    run(kind, device, before=[*PROMPT[:cached], 99, 98, 97], prompt=PROMPT)
    run(kind, device, before=PROMPT[:cached], prompt=PROMPT[:cached])
