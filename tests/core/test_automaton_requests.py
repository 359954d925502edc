"""Requests whose grammars are automata on the device: the same outputs as with masks of the host, and nothing for the host to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from grammar_world import TableBackend, TableGrammar, TableMatcher, TablePlugin, written

from modelrunner import Observer, RequestFinish, SamplingParams, StructuredOutputsParams, hookimpl
from modelrunner.errors import RequestError
from modelrunner.testing import Driver, EngineProbe, P, Subject, assert_same, dense
from modelrunner.testing.byte_tokenizer import EOS, FIRST_BYTE

LETTERS = 'root ::= ([a-e]{3, 14} ("x" | "yé"))'
PAIRS = r'root ::= ("{" pair ("," pair){0, 3} "}")' + "\n" + r'pair ::= ("\"" [a-e]{1, 3} "\":" ("1" | "22" | "true" | "null"))'
TEXTS = ["another thing", "one thing", "one", "xyz é"]
RULES = [{"grammar": LETTERS}, {"choice": TEXTS}, {"grammar": PAIRS}]
SHAPES = [r"[a-e]{3,14}(x|yé)", "|".join(TEXTS), r'\{"[a-e]{1,3}":(1|22|true|null)(,"[a-e]{1,3}":(1|22|true|null)){0,3}\}']
PLAIN = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
IDS = {letter: FIRST_BYTE + ord(letter) for letter in "abcdexy"}
MORE: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"top_p": 0.8, "top_k": 9, "min_p": 0.01},
    {"logit_bias": {IDS["b"]: 3.0, IDS["x"]: -2.0}},
    {"min_tokens": 4},
    {"bad_words": ["a", "bc"]},
    {"allowed_token_ids": [*IDS.values(), *range(FIRST_BYTE, FIRST_BYTE + 256), EOS]},
    {"allowed_token_ids": list(range(FIRST_BYTE, FIRST_BYTE + 256)), "logprobs": 1},  # and no end
    {"allowed_token_ids": [*IDS.values(), EOS]},  # which cannot end it
    {"max_tokens": 3},
    {"stop": ["c"], "include_stop_str_in_output": True},
    {"stop_token_ids": [IDS["d"]]},
    {"ignore_eos": True},
    {"n": 3},
]


def asked(i: int, **more: Any) -> SamplingParams:
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": i} if i % 3 else {"temperature": 0.0}
    if drawn["temperature"] == 0.0 and more.get("n"):
        drawn = {"temperature": 0.7, "seed": i}
    given = {"max_tokens": 40, **drawn, **more}
    return SamplingParams(structured_outputs=StructuredOutputsParams(**RULES[i % len(RULES)]), **given)


def subject(*plugins: object) -> Subject:
    return Subject(dense().model, "tables", (*dense().plugins, TablePlugin(), *plugins))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    def made(way: str = "device", settings: dict[str, Any] | None = None, plugins: Sequence[object] = (), **short: Any) -> Driver:
        monkeypatch.setenv("MODELRUNNER_GRAMMAR__AUTOMATON_MEMORY", "1" if way == "device" else "0")
        for name, value in (settings or {}).items():
            monkeypatch.setenv("MODELRUNNER_" + name.upper().replace(".", "__"), str(value))
        return Driver(subject(*plugins).engine(**short))

    return made


def everything(driver: Driver) -> list[Any]:
    """What came of one request of each kind, in one batch with plain ones, of which some are aborted."""
    for i, more in enumerate(MORE):
        for j in range(2):
            driver.add(f"{i}-{j}", P(5 + (7 * i + 11 * j) % 40, i), asked(i + j, **more))
        driver.add(f"plain-{i}", P(9 + i, i), PLAIN)
    for name in ("0-1", "3-1"):
        driver.step_until(lambda name=name: driver.num_tokens(name) >= 2 or driver.is_finished(name))
        driver.engine.abort(name)
    driver.finish()
    found = []
    for i in range(len(MORE)):
        for j in range(2):
            if f"{i}-{j}" in ("0-1", "3-1"):
                continue
            for choice in driver.final(f"{i}-{j}").outputs:
                tops = None if choice.logprobs is None else [sorted(each) for each in choice.logprobs]
                found.append((f"{i}-{j}", list(choice.token_ids), choice.finish_reason, choice.stop_reason, choice.text, tops))
        assert_same(dense(), P(9 + i, i), PLAIN, driver.result(f"plain-{i}"))
    return found


@pytest.mark.parametrize(
    "short",
    [
        {"depth": 1, "prefix": False, "chunked": False},
        {"depth": 2, "device": "deferred_cpu"},
        {"depth": 3, "device": "deferred_cpu", "tokens": 24, "device_seed": 5},
        {"depth": 2, "device": "deferred_cpu", "captures": True, "rows": 5, "pages": 10, "tokens": 32},
    ],
    ids=lambda short: "-".join(f"{name}={value}" for name, value in short.items()),
)
def test_both_ways_give_the_same(make: Callable[..., Driver], short: dict[str, Any]) -> None:
    drivers = {way: make(way, **short) for way in ("device", "host")}
    results = {way: everything(driver) for way, driver in drivers.items()}
    for got, want in zip(results["device"], results["host"], strict=True):
        assert got == want
    assert {reason for _, _, reason, *_ in results["device"]} >= {"stop", "length", "error"}
    requests = 2 * (len(MORE) + 2)
    assert drivers["device"].engine.guides.ways == {"device": requests}
    assert drivers["host"].engine.guides.ways.total() == requests
    for name, ids, reason, _, _, _ in results["device"]:
        if reason == "stop" and not name.startswith(("11-", "12-")):
            assert re.fullmatch(SHAPES[sum(map(int, name.split("-"))) % 3], written(ids)), name
    if short.get("pages"):
        assert all(driver.engine.scheduler.stats.preemptions for driver in drivers.values()), "nobody gave way"
    for driver in drivers.values():
        EngineProbe(driver).assert_clean()


def test_beside_rows_that_draft(make: Callable[..., Driver]) -> None:
    """In steps with drafts a row with a grammar has one place; its state moves by its own token alone."""
    results = []
    for way, drafter in (("device", ""), ("device", "ngram"), ("host", "ngram")):
        settings = {"speculation.drafter": drafter} if drafter else {}
        driver = make(way, settings=settings, depth=2, device="deferred_cpu", rows=16)
        for i in range(10):
            driver.add(f"r{i}", P(9 + i, i), asked(i, **MORE[i]))
        for i in range(4):
            driver.add(f"plain{i}", P(5, i) * 4, PLAIN)
        driver.finish()
        assert bool(driver.engine.scheduler.stats.num_drafted) == bool(drafter)
        results.append([(list(each.token_ids), each.finish_reason) for each in (driver.result(f"r{i}") for i in range(10))])
        for i in range(4):
            assert_same(dense(), P(5, i) * 4, PLAIN, driver.result(f"plain{i}"))
        EngineProbe(driver).assert_clean()
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_host_does_nothing_for_these_rows(make: Callable[..., Driver], depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No matcher, no mask, no held row, no patch: steps are repeated as those of plain rows are."""

    def never(*arguments: Any) -> None:
        raise AssertionError("the host was asked")

    for owner, name in ((TableBackend, "compile"), (TableGrammar, "__init__"), (TableMatcher, "fill"), (TableMatcher, "accept")):
        monkeypatch.setattr(owner, name, never)
    driver = make(depth=depth, pages=256)
    engine, patches, repeated = driver.engine, [], 0
    for i in range(6):
        driver.add(f"r{i}", P(17, i), asked(3 * i, max_tokens=30))
    driver.add("plain", P(17, 9), PLAIN)
    launch = engine.runner.launch
    monkeypatch.setattr(engine.runner, "launch", lambda plan: (patches.append(plan.patch.words.size), launch(plan))[1])
    while engine.has_unfinished():
        driver.step()
        scheduler = engine.scheduler
        assert (scheduler.num_held, scheduler.num_guided, len(engine.guides._late)) == (0, 0, 0)
        repeated += scheduler._steady is not None
    assert repeated > 2, "no step was repeated"
    assert patches.count(0) > 2, "every step had a patch"
    assert engine.scheduler.stats.held == 0
    assert engine.guides.ways == {"device": 6}
    EngineProbe(driver).assert_clean()


def test_rows_are_in_every_step(make: Callable[..., Driver]) -> None:
    """Beside plain rows, at depth 2, an output takes as many steps as it has tokens; masks of the host take about twice as many."""
    steps = {}
    for way in ("device", "host"):
        driver = make(way, depth=2)
        driver.add("plain", P(9, 3), PLAIN.model_copy(update={"max_tokens": 60}))
        driver.add("a", P(9, 1), SamplingParams(max_tokens=40, structured_outputs=StructuredOutputsParams(choice=["abcdefghijklmnopqrst"])))
        driver.step_until(lambda driver=driver: driver.num_tokens("a") >= 1)
        before, known = driver.engine.scheduler.stats.steps, driver.num_tokens("a")
        driver.step_until(lambda driver=driver: driver.is_finished("a"))
        steps[way] = driver.engine.scheduler.stats.steps - before
        assert written(driver.result("a").token_ids) == "abcdefghijklmnopqrst"
        rest = len(driver.result("a").token_ids) - known
        driver.finish()
        assert rest > 15
        assert steps[way] == rest if way == "device" else steps[way] > 1.5 * rest


@pytest.mark.parametrize("depth", [1, 2])
def test_what_does_not_fit_goes_the_hosts_way(make: Callable[..., Driver], depth: int) -> None:
    driver = make(depth=depth, settings={"grammar.automaton_states": 12})
    big = StructuredOutputsParams(choice=["a text of more than twelve states"])
    driver.add("big", P(9, 1), SamplingParams(max_tokens=60, structured_outputs=big))
    driver.add("small", P(9, 2), SamplingParams(max_tokens=60, structured_outputs=StructuredOutputsParams(choice=["small"])))
    driver.finish()
    assert driver.engine.guides.ways == {"host: it takes more than 12 states": 1, "device": 1}
    assert [written(driver.result(name).token_ids) for name in ("big", "small")] == ["a text of more than twelve states", "small"]
    EngineProbe(driver).assert_clean()


def test_observers_are_told_which_way_a_request_took(make: Callable[..., Driver]) -> None:
    ends: dict[str, str | None] = {}

    class Watcher(Observer):
        def on_request_finish(self, event: RequestFinish) -> None:
            ends[event.request_id] = event.grammar_way

    class Plugin:
        MODELRUNNER_API = ">=1,<2"

        @hookimpl
        def observer(self) -> Observer:
            return Watcher()

    driver = make(depth=2, plugins=(Plugin(),))
    assert "states of grammars" in str(driver.engine.assembly.resolved)
    driver.add("a", P(9, 1), asked(1))
    driver.add(
        "b", P(9, 2), SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(grammar='root ::= "(" root ")" | "z"'))
    )
    driver.add("c", P(9, 3), SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex="a")))
    driver.add("plain", P(9, 4), PLAIN)
    driver.finish()
    driver.step()
    assert ends == {"a": "device", "b": None, "c": None, "plain": None}, "those that no backend understands took no way"
    driver.engine.close()


def test_a_full_arena_sends_the_next_ones_to_the_host(make: Callable[..., Driver]) -> None:
    driver = make(depth=2, rows=16)
    arena = driver.engine.guides.arena
    assert arena is not None
    arena.num_states = 50
    for i in range(6):
        text = f"{i} and twenty more letters"
        params = SamplingParams(max_tokens=60, seed=i, structured_outputs=StructuredOutputsParams(choice=[text]))
        driver.add(f"r{i}", P(9, i), params)
        driver.add(f"again{i}", P(12, i), params)
    driver.finish()
    ways = driver.engine.guides.ways
    assert ways["device"] == 2
    assert sum(count for way, count in ways.items() if "states are free (setting grammar.automaton_memory)" in way) == 10
    for i in range(6):
        for name in (f"r{i}", f"again{i}"):
            assert written(driver.result(name).token_ids) == f"{i} and twenty more letters"
    assert all(not place.holders for place in arena._places.values())
    driver.add("later", P(9, 9), SamplingParams(max_tokens=60, structured_outputs=StructuredOutputsParams(choice=["there is room again"])))
    driver.finish()
    assert ways["device"] == 3
    EngineProbe(driver).assert_clean()


def test_a_load_that_fails_goes_the_hosts_way(make: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make(depth=2)
    assert driver.engine.guides.arena is not None

    def failing(*arguments: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(driver.engine.guides.arena, "_copy", failing)
    driver.add("a", P(9, 1), asked(1))
    driver.finish()
    assert list(driver.engine.guides.ways) == ["host: loading it failed: RuntimeError: planted"]
    assert re.fullmatch(SHAPES[1], written(driver.result("a").token_ids))
    EngineProbe(driver).assert_clean()


def test_aborted_while_it_is_loaded(make: Callable[..., Driver]) -> None:
    driver = make(depth=2)
    arena = driver.engine.guides.arena
    assert arena is not None
    driver.add("a", P(9, 1), asked(1))
    driver.step_until(lambda: arena.busy)
    driver.engine.abort("a")
    driver.finish()
    assert driver.result("a").finish_reason == "abort"
    assert [place.holders for place in arena._places.values()] == [0]
    EngineProbe(driver).assert_clean()


def test_contradictions_are_told_as_by_the_host(make: Callable[..., Driver]) -> None:
    for way in ("device", "host"):
        driver = make(way, depth=2)
        allowed = asked(1, allowed_token_ids=[IDS["a"], EOS])
        driver.add("a", P(9, 1), allowed)
        driver.finish()
        result = driver.result("a")
        assert result.finish_reason == "error"
        assert re.fullmatch(
            r"structured_outputs and allowed_token_ids: together they leave no token after \d output tokens", str(result.stop_reason)
        )


def test_no_seats_are_needed(make: Callable[..., Driver]) -> None:
    """But one that might go the host's way is refused where there are none."""
    driver = make(depth=2, settings={"sampler.allow_list_seats": 1})
    for i in range(4):
        driver.add(f"r{i}", P(9, i), asked(3 * i))
    most = 0
    while driver.engine.has_unfinished():
        driver.step()
        most = max(most, driver.engine.scheduler.num_running)
    assert most == 4
    none = make(settings={"sampler.allow_list_seats": 0})
    with pytest.raises(RequestError, match="allowed_ids"):
        none.add("a", P(9, 1), asked(1))
