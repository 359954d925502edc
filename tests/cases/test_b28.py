"""B28: with overlapped steps the grammar matcher refused token after token; matchers must see each token once, preempted or not."""

from __future__ import annotations

import json

import pytest
from grammar_world import ChoiceBackend, ChoicePlugin, written

from modelrunner import SamplingParams, StructuredOutputsParams
from modelrunner.engine import Engine
from modelrunner.testing import Driver, EngineProbe, P, assert_same, dense, options

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("xgrammar")
ITEMS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9999}, "minItems": 8, "maxItems": 20}
SCHEMA = {"type": "object", "properties": {"numbers": ITEMS}, "required": ["numbers"]}


def params(s: int) -> SamplingParams:
    drawn = {"temperature": 1.0, "seed": 28 + s} if s % 2 else {"temperature": 0.0}
    return SamplingParams(max_tokens=150, structured_outputs=StructuredOutputsParams(json=SCHEMA), **drawn)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(("way", "drafter"), [("device", None), ("host", None), ("device", "ngram")])
def test_grammars_across_preemption_and_overlap(
    way: str, drafter: str | None, depth: int, prefix: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELRUNNER_GRAMMAR__MAX_WHITESPACE", "0")
    monkeypatch.setenv("MODELRUNNER_GRAMMAR__AUTOMATON_MEMORY", "1" if way == "device" else "0")
    subject = dense()
    driver = Driver(
        subject.engine(depth=depth, prefix=prefix, rows=4, pages=24, tokens=32, device=device, device_seed=depth, drafter=drafter)
    )
    probe = EngineProbe(driver)
    probe.poison_freed_pages()
    for s in range(4):
        driver.add(f"r{s}", P(20 + 5 * s, s), params(s))
    guides = [driver.engine.requests[f"r{s}"].guide for s in range(4)]
    for s in range(4):  # each in mid-text
        driver.step_until(lambda s=s: driver.num_tokens(f"r{s}") >= 4 + s)
        probe.preempt(f"r{s}")
    driver.step_until(lambda: driver.num_tokens("r3") >= 10)
    driver.engine.abort("r3")
    assert guides[3] is not None
    assert guides[3].matcher is None, "the aborted request's matcher is kept"
    driver.finish()
    assert {each.partition(":")[0] for each in driver.engine.guides.ways} == {way}
    assert bool(driver.engine.scheduler.stats.num_drafted) == bool(drafter)
    assert probe.counters().preemptions >= 4
    assert driver.result("r3").finish_reason == "abort"
    for s in range(3):
        result = driver.result(f"r{s}")
        assert driver.final(f"r{s}").metrics.num_preemptions >= 1
        assert result.finish_reason == "stop"
        jsonschema.validate(json.loads(written(result.token_ids)), SCHEMA)
        assert_same(subject, P(20 + 5 * s, s), params(s), result)
    probe.assert_clean()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_matcher_sees_each_token_once(depth: int) -> None:
    texts = [f"number {i:04d} and more" for i in range(5)]
    subject = dense()
    engine = Engine({"model": {"name": subject.model}} | options(depth=depth, pages=12), plugins=[*subject.plugins, ChoicePlugin()])
    driver = Driver(engine)
    probe = EngineProbe(driver)
    ChoiceBackend.log.clear()
    one = SamplingParams(temperature=1, seed=2, max_tokens=60, structured_outputs=StructuredOutputsParams(choice=texts))
    driver.add("a", P(20, 1), one)
    driver.add("b", P(20, 2), one)
    for tokens in (3, 6, 9):
        driver.step_until(lambda tokens=tokens: driver.num_tokens("a") >= tokens)
        probe.preempt("a")
    driver.finish()
    results = [driver.result(name) for name in "ab"]
    assert all(written(result.token_ids) in texts and result.finish_reason == "stop" for result in results)
    emitted = sum(len(result.token_ids) for result in results)
    assert ChoiceBackend.log["accepted"] == emitted
    assert ChoiceBackend.log["compiled"] == 1, "the same grammar is compiled once"
    assert ChoiceBackend.log["matchers"] == 2
    assert ChoiceBackend.log["filled"] == emitted + 2
