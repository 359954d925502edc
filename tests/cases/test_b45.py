"""B45: a tail of one prompt token, padded with placeholder drafts, pushed the state past its token; a step that kept nothing hit another
request's state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hybrid import hybrid

from modelrunner import SamplingParams
from modelrunner.batch import Plan
from modelrunner.testing import Driver, EngineProbe, P, ScriptDrafterPlugin, assert_same, ref

PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.mark.parametrize("depth", [1, 2])
def test_rejected_drafts_a_lone_prompt_token_and_an_abort(depth: int, device: str) -> None:
    """A decodes with all drafts rejected, B's last prompt token is alone in a step beside it, C goes while its drafts are in flight."""
    right = ref(hybrid(), P(9, 1), PARAMS).token_ids
    drafter = ScriptDrafterPlugin(lambda request: [(token + 1) % 331 for token in right])
    subject = replace(hybrid(), plugins=(*hybrid().plugins, drafter))
    driver = Driver(subject.engine(depth=depth, drafter="script", device=device, tokens=24, mixed_tokens=24, prefix=False))
    probe = EngineProbe(driver)
    probe.poison_freed_pages()
    driver.add("A", P(9, 1), PARAMS)
    driver.add("C", P(8, 3), PARAMS)
    driver.step_until(lambda: driver.num_tokens("A") >= 3)
    lone: list[Plan] = []

    def listen(plan: Plan) -> bool:
        row, rows = probe.row_of("B"), probe.scheduler.rows
        if row in plan.rows[: plan.num_decode] and rows.known_lower[row] == 18 and plan.num_decode > 1:  # the plan counts its first output
            lone.append(plan)
        return False

    probe.once("planned", lambda: None, listen)
    driver.add("B", P(17, 2), PARAMS)
    driver.step()
    driver.engine.abort("C")
    before = driver.num_tokens("A")
    steps = driver.engine.scheduler.stats.steps
    driver.step_until(lambda: driver.num_tokens("A") >= before + 8)
    assert driver.engine.scheduler.stats.steps - steps >= 8 - depth
    driver.finish()
    assert lone, "the prompt's last token stood alone in a step"
    for name, prompt in (("A", P(9, 1)), ("B", P(17, 2))):
        assert_same(hybrid(), prompt, PARAMS, driver.result(name))
    assert driver.engine.scheduler.stats.num_accepted <= 2, "by accident at most"
    cache = driver.engine.runner.parts.caches["recurrent"]
    assert torch.equal(cache[0], torch.zeros_like(cache[0])), "the null page was written"
    probe.assert_clean()
