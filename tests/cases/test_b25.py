"""B25: in a batch of constrained and plain requests, plain rows got an all-zero mask, or masks lay on other requests' rows."""

from __future__ import annotations

import json
import random
import re

import pytest
from grammar_world import written

from modelrunner import SamplingParams, StructuredOutputsParams
from modelrunner.batch import MASKED
from modelrunner.testing import Driver, EngineProbe, P, assert_same, dense

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 999}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
}
REGEX, CHOICE = "[a-d]{4,9}(x|yy)", ("hello", "help", "world")
PLAIN = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
KINDS: list[SamplingParams] = [
    PLAIN,
    SamplingParams(temperature=1, seed=1, max_tokens=40, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    PLAIN.model_copy(update={"max_tokens": 3}),  # ends early, so that rows shift
    SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=REGEX)),
    PLAIN,
    SamplingParams(temperature=0.8, seed=5, max_tokens=40, structured_outputs=StructuredOutputsParams(choice=CHOICE)),
    SamplingParams(temperature=1, seed=6, max_tokens=24, ignore_eos=True),
    PLAIN,
]
PROMPTS = [P(5 + 5 * i, i) for i in range(len(KINDS))]


def obeys(i: int, text: str) -> bool:
    if i == 1:
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    return re.fullmatch(REGEX, text) is not None if i == 3 else text in CHOICE


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", ["device", "host"])
def test_masks_touch_only_their_own_rows(way: str, depth: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELRUNNER_GRAMMAR__MAX_WHITESPACE", "0")
    monkeypatch.setenv("MODELRUNNER_GRAMMAR__AUTOMATON_MEMORY", "1" if way == "device" else "0")
    subject = dense()
    driver = Driver(subject.engine(rows=8, tokens=24, depth=depth, prefix=False, device=device, device_seed=depth))
    probe = EngineProbe(driver)
    rng, mixed, held = random.Random(25), 0, 0
    for turn in range(24):
        order = list(range(len(KINDS)))
        if turn:
            rng.shuffle(order)
        for i in order:
            driver.add(f"{turn}-{i}", PROMPTS[i], KINDS[i])
        while driver.engine.has_unfinished():
            driver.step()
            rows = driver.engine.scheduler.rows
            constrained = rows.active & (rows.features & int(MASKED) != 0)
            filling = constrained & (rows.computed_upper < rows.num_prompt)
            sampling = constrained & (rows.computed_upper >= rows.num_prompt)
            mixed += bool(filling.any() and sampling.any())
            held += bool(rows.held.any() and (rows.active & ~rows.held).any())
        for i, params in enumerate(KINDS):
            result = driver.result(f"{turn}-{i}")
            assert_same(subject, PROMPTS[i], params, result)
            if params.structured_outputs is not None:
                assert result.finish_reason == "stop"
                assert obeys(i, written(result.token_ids))
    assert mixed, "no constrained request was in mid-prefill while another was sampled"
    assert bool(held) == (depth > 1 and way == "host"), "rows of guides are held while others run, and no others"
    ways = driver.engine.guides.ways
    assert {each.partition(":")[0] for each in ways} == {way}
    assert ways.total() == 3 * 24
    probe.assert_clean()
