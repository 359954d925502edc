"""B14: with speculation, bans hit the rows that came first, and the border between committed and draft tokens was off by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from draft_world import drafted, greedy

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, ScriptDrafterPlugin, Subject, assert_same, dense, ref

PROMPTS = [P(15 + salt, salt) for salt in range(6)]
BANNED = (1, 3)  # rows


def bans(row: int, first: bool) -> list[tuple[int, ...]]:
    """The 2 and the 3 tokens of the plain output at places 4 and 8; with `first`, its first one after the prompt's last token, too."""
    output = tuple(ref(dense(), PROMPTS[row], greedy()).token_ids)
    return [output[4:6], output[8:11], *([(PROMPTS[row][-1], output[0])] if first else [])]


def wishes(first: bool) -> list[SamplingParams]:
    return [greedy(bad_words=bans(row, first)) if row in BANNED else greedy() for row in range(6)]


def holds(sequence: Sequence[int], output: Sequence[int]) -> bool:
    return any(tuple(output[i : i + len(sequence)]) == tuple(sequence) for i in range(len(output)))


# Drafts after a request's first, second, ... step. The prompt's own step gives place 0; then places 1 + accepted are known, and so on: so
# a sequence at places 4, 5 or 8, 9, 10 lies in known tokens (no drafts), inside one run, or across its border, at each of its tokens.
@pytest.mark.parametrize("first", [False, True], ids=["", "after the prompt"])
@pytest.mark.parametrize("turns", [(0,), (3,), (2, 3), (1, 3), (0, 0, 3, 1), (1,), (2,), (0, 3)], ids=str)
def test_bans_hit_their_own_row_wherever_they_fall(turns: tuple[int, ...], first: bool, device: str) -> None:
    driver = Driver(drafted(turns=turns).engine(drafter="script", drafts=3, rows=8, device=device))
    for row, params in enumerate(wishes(first)):
        driver.add(str(row), PROMPTS[row], params)
    driver.finish()
    for row, params in enumerate(wishes(first)):
        result = driver.result(str(row))
        assert_same(dense(), PROMPTS[row], params, result)
        if row in BANNED:
            assert not any(holds(each, result.token_ids) for each in bans(row, False))
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("turns", [(3,), (1, 3), (2,)], ids=str)
def test_drafts_that_a_ban_forbids_are_rejected(turns: tuple[int, ...], device: str) -> None:
    """The drafter proposes what a row would say without its ban: up to the ban all holds, and there the plain token does not."""
    plain = [list(ref(dense(), prompt, greedy()).token_ids) for prompt in PROMPTS]
    outputs = {tuple(prompt): output for prompt, output in zip(PROMPTS, plain, strict=True)}
    plugin = ScriptDrafterPlugin(lambda request: outputs[tuple(request.prompt_token_ids)], turns)
    subject = Subject(dense().model, "drafted", (*dense().plugins, plugin))
    driver = Driver(subject.engine(drafter="script", drafts=3, rows=8, device=device))
    for row, params in enumerate(wishes(False)):
        driver.add(str(row), PROMPTS[row], params)
    driver.finish()
    for row, params in enumerate(wishes(False)):
        assert_same(dense(), PROMPTS[row], params, driver.result(str(row)))
    assert driver.engine.scheduler.stats.num_accepted > 0


def test_the_first_token_of_a_ban_may_come_alone() -> None:
    for row in BANNED:
        first, second = bans(row, False)
        output = list(ref(dense(), PROMPTS[row], wishes(False)[row]).token_ids)
        assert output[4] == first[0]
        assert output[5] != first[1]
        assert second[0] in range(331)
