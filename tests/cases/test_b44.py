"""B44: after a step with accepted drafts, a step without drafts read the state from before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hybrid import hybrid
from modelrunner_recurrent.scan import page_parts, update
from modelrunner_recurrent.state import REPLAY

from modelrunner import SamplingParams
from modelrunner.request import Request
from modelrunner.testing import Driver, P, R, ScriptDrafterPlugin, assert_same, ref

PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
TURNS = (3, 0, 3, 0, 1, 0, 2)
PROMPTS = (P(20, 1), P(7, 2), P(33, 3))


def propose(wrong: Callable[[int], bool]) -> Callable[[Request], list[int]]:
    """A script: the reference output, with another token wherever `wrong` says so."""

    def script(request: Request) -> list[int]:
        output = ref(hybrid(), request.prompt_token_ids, PARAMS).token_ids
        return [(token + 1) % 331 if wrong(place) else token for place, token in enumerate(output)]

    return script


def states(driver: Driver) -> dict[tuple[str, int], torch.Tensor]:
    """The state of every layer with one, after the committed tokens of each running request: by request and number of tokens."""
    engine, found = driver.engine, {}
    layouts, caches = engine.runner.parts.layouts, engine.runner.parts.caches["recurrent"]
    number = next(i for i, layout in enumerate(layouts) if layout.name == "recurrent")
    state, rows = engine.assembly.state, engine.scheduler.rows
    for name, request in engine.requests.items():
        if (row := request.row) < 0 or not (computed := int(rows.computed[row])):
            continue
        page = int(rows.tables[number].pages[row, (computed - 1) // layouts[number].tokens_per_page])
        for layer in range(caches.shape[1]):
            value, base, inputs = (part[page] for part in page_parts(caches[:, layer], state.heads, state.head_dim, REPLAY))  # type: ignore[attr-defined]
            for i in range(computed - int(base)):
                value = update(value.unsqueeze(0), *(part.unsqueeze(0) for part in inputs[i])).squeeze(0)
            found[f"{name} {layer}", computed] = value.clone()
    return found


def decode(driver: Driver, count: int) -> dict[tuple[str, int], torch.Tensor]:
    """Run requests that arrive at different turns. Returns every state that was there after a step."""
    seen: dict[tuple[str, int], torch.Tensor] = {}
    for number, prompt in enumerate(PROMPTS[:count]):
        driver.add(str(number), prompt, PARAMS)
        driver.step()
        seen |= states(driver)
    while driver.engine.has_unfinished():
        driver.step()
        seen |= states(driver)
    for number, prompt in enumerate(PROMPTS[:count]):
        assert_same(hybrid(), prompt, PARAMS, driver.result(str(number)))
    return seen


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("wrong", [lambda place: False, lambda place: place % 3 == 1, lambda place: True], ids=["all", "half", "none"])
def test_states_are_those_of_plain_decoding(wrong: Callable[[int], bool], count: int) -> None:
    subject = replace(hybrid(), plugins=(*hybrid().plugins, ScriptDrafterPlugin(propose(wrong), TURNS)))
    driver = Driver(subject.engine(depth=1, drafter="script", prefix=False))
    drafted, plain = decode(driver, count), decode(Driver(hybrid().engine(depth=1, prefix=False)), count)
    stats = driver.engine.scheduler.stats
    assert stats.num_drafted > 20 * count
    assert (stats.num_accepted == stats.num_drafted) == (not wrong(1))
    assert (stats.num_accepted > 0) == (not wrong(0))
    assert drafted.keys() <= plain.keys()
    assert len(drafted) > 2 * 20 * count
    for key, state in drafted.items():
        torch.testing.assert_close(state, plain[key], rtol=1e-5, atol=1e-5 * max(1.0, float(plain[key].abs().max())))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_with_steps_in_flight(depth: int, device: str) -> None:
    subject = replace(hybrid(), plugins=(*hybrid().plugins, ScriptDrafterPlugin(propose(lambda place: place % 4 == 3), TURNS)))
    for drafter, prompts in (("script", PROMPTS), ("ngram", (R(6), P(17, 4)))):
        driver = Driver(subject.engine(depth=depth, drafter=drafter, device=device, tokens=128, captured_tokens=32))
        for number, prompt in enumerate(prompts):
            driver.add(str(number), prompt, PARAMS)
            driver.step()
        driver.finish()
        for number, prompt in enumerate(prompts):
            assert_same(hybrid(), prompt, PARAMS, driver.result(str(number)))
