"""Several choices of a request: one prompt computed once, independent rows, told as one; however they are scheduled and end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from engine_world import start

from modelrunner import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from modelrunner.choices import Told
from modelrunner.errors import RequestError
from modelrunner.request import Request
from modelrunner.testing import Driver, EngineProbe, P, Subject, dense, mixed, scripted

SEEDED = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=10, ignore_eos=True)
LONG = P(60, 5)
FULL_PAGES = 48  # tokens of LONG in whole pages
SCHEDULES: dict[str, dict[str, Any]] = {
    "depth_1": {"depth": 1},
    "depth_3": {"depth": 3, "device": "deferred_cpu"},
    "chunks": {"tokens": 17},
    "few_rows": {"rows": 2},
    "no_prefix": {"prefix": False},
    "whole_prompts": {"chunked": False, "prefix": False},
    "graphs": {"device": "deferred_cpu", "captures": True},
}


def ids(output: RequestOutput) -> list[list[int]]:
    assert [completion.index for completion in output.outputs] == list(range(len(output.outputs)))
    return [list(completion.token_ids) for completion in output.outputs]


def alone(prompt: list[int], params: SamplingParams) -> list[list[int]]:
    """Each choice in an engine of its own that does nothing else."""
    found = []
    for choice in range(params.n):
        driver = Driver(dense().engine(depth=1, rows=1, prefix=False))
        driver.add("a", prompt, params.model_copy(update={"n": 1}), choice=choice)
        driver.finish()
        found.append(list(driver.result("a").token_ids))
    return found


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    return alone(LONG, SEEDED)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_each_choice_is_what_it_is_alone(schedule: str, wanted: list[list[int]]) -> None:
    """And of the prompt only what no page holds whole is computed again."""
    driver = Driver(dense().engine(**SCHEDULES[schedule]))
    probe = EngineProbe(driver)
    driver.add("a", LONG, SEEDED)
    driver.add("b", P(9, 3), SEEDED.model_copy(update={"n": 1}))
    driver.finish()
    assert ids(driver.final("a")) == wanted
    assert len({tuple(choice) for choice in wanted}) == 4
    assert [len(driver.outputs[name][-1].outputs) for name in "ab"] == [4, 1]
    stats = driver.engine.scheduler.stats
    assert (stats.cached_tokens, stats.prompt_tokens) == (3 * FULL_PAGES, len(LONG) + 9)
    assert driver.final("a").num_cached_tokens == 0
    probe.assert_clean()


def test_without_prefix_caching_nothing_stays_behind(wanted: list[list[int]]) -> None:
    """Others of the same prompt find nothing, neither meanwhile nor later."""
    driver = Driver(dense().engine(prefix=False))
    driver.add("a", LONG, SEEDED)
    driver.add("b", LONG, SEEDED)
    driver.add("c", LONG, SEEDED.model_copy(update={"n": 1}))
    driver.finish()
    assert ids(driver.final("a")) == ids(driver.final("b")) == wanted
    assert driver.engine.scheduler.stats.cached_tokens == 6 * FULL_PAGES
    pool = driver.engine.scheduler.pool
    assert not pool._index
    driver.add("d", LONG, SEEDED.model_copy(update={"n": 1}))
    driver.finish()
    assert driver.engine.scheduler.stats.cached_tokens == 6 * FULL_PAGES
    EngineProbe(driver).assert_clean()


def test_one_choice_is_preempted(wanted: list[list[int]]) -> None:
    for victim in ("a#0", "a#2"):
        driver = Driver(dense().engine(device="deferred_cpu"))
        probe = EngineProbe(driver)
        driver.add("a", LONG, SEEDED)
        driver.step_until(lambda: probe.num_running == 4)  # noqa: B023
        probe.preempt(victim)
        driver.finish()
        assert ids(driver.final("a")) == wanted
        assert driver.final("a").metrics.num_preemptions == 1
        probe.assert_clean()


def test_a_small_pool_preempts_choices_and_goes_on() -> None:
    params = SEEDED.model_copy(update={"n": 6, "max_tokens": 40})
    driver = Driver(dense().engine(pages=16))
    driver.add("a", LONG, params)
    driver.finish()
    assert ids(driver.final("a")) == alone(LONG, params)
    assert driver.engine.scheduler.stats.preemptions
    EngineProbe(driver).assert_clean()


def test_the_leader_may_end_before_its_prompt_is_computed(wanted: list[list[int]]) -> None:
    """The next choice takes its place; the last one's end frees all."""
    driver = Driver(dense().engine(tokens=17))
    probe = EngineProbe(driver)
    driver.add("a", LONG, SEEDED)
    driver.step()
    assert (probe.num_running, driver.engine.scheduler.num_waiting) == (1, 3)
    driver.engine.abort("a#0")
    driver.finish()
    got = ids(driver.final("a"))
    assert got[0] == []
    assert got[1:] == wanted[1:]
    assert [c.finish_reason for c in driver.final("a").outputs] == ["abort", "length", "length", "length"]
    assert driver.engine.scheduler.stats.cached_tokens >= 2 * FULL_PAGES
    probe.assert_clean()


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_ends_all_choices(steps: int) -> None:
    driver = Driver(dense().engine(tokens=17))
    driver.add("a", LONG, SEEDED)
    for _ in range(steps):
        driver.step()
    driver.engine.abort("a")
    driver.finish()
    assert {c.finish_reason for c in driver.final("a").outputs} == {"abort"}
    EngineProbe(driver).assert_clean()


def test_choices_end_by_themselves() -> None:
    """Each at its own stop string; those that have ended are told again in cumulative outputs, and not in deltas."""
    driver = Driver(dense().engine())
    params = SEEDED.model_copy(update={"ignore_eos": False, "max_tokens": 30, "stop": ["e", "a", "o", "t"]})
    driver.add("all", LONG, params)
    driver.add("new", LONG, params.model_copy(update={"output_kind": "delta"}))
    driver.add("end", LONG, params.model_copy(update={"output_kind": "final_only"}))
    driver.finish()
    want = driver.final("all").outputs
    assert len({len(completion.token_ids) for completion in want}) > 1, "all choices are of one length, which shows little"
    assert all(len(output.outputs) == 4 for output in driver.outputs["all"])
    assert [len(driver.outputs["end"]), driver.outputs["end"][0].finished] == [1, True]
    assert driver.final("end").outputs == want
    text, tokens = [""] * 4, [[] for _ in range(4)]
    for output in driver.outputs["new"]:
        for completion in output.outputs:
            text[completion.index] += completion.text
            tokens[completion.index] += completion.token_ids
        assert output.finished == (output is driver.outputs["new"][-1])
    assert text == [completion.text for completion in want]
    assert tokens == [list(completion.token_ids) for completion in want]


def test_answers_that_have_not_begun_have_no_log_probs_yet() -> None:
    """They have lists of none, not None, if log-probs are asked for."""
    driver = Driver(dense().engine(depth=1, rows=1))
    driver.add("a", P(9, 1), SEEDED.model_copy(update={"logprobs": 1, "max_tokens": 3}))
    driver.add("b", P(9, 2), SEEDED.model_copy(update={"max_tokens": 3}))
    driver.finish()
    for completion in (each for output in driver.outputs["a"] for each in output.outputs):
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.cumulative_logprob is not None
        assert (completion.cumulative_logprob < 0) == bool(completion.token_ids)
    assert {each.logprobs for output in driver.outputs["b"] for each in output.outputs} == {None}


def test_tokens_of_two_versions_are_told_apart() -> None:
    """Deltas of two answers are one output only where the same weights gave them."""
    driver = Driver(dense().engine())
    driver.add("a", P(9, 1), SamplingParams(max_tokens=1, output_kind="delta"))
    driver.finish()
    old, new = driver.final("a"), replace(driver.final("a"), weight_version="new")
    told = Told(Request("t", P(9, 1), SamplingParams(n=3, output_kind="delta"), arrival=0, limit=99, seed=0))
    assert told.take(0, old) is None
    assert told.take(1, old) is None
    first, rest = told.take(2, new), told.output()
    assert first is not None
    assert rest is not None
    assert [(output.weight_version, [each.index for each in output.outputs]) for output in (first, rest)] == [("0", [0, 1]), ("new", [2])]


def test_ids_are_in_use_until_all_choices_have_ended() -> None:
    driver = Driver(dense().engine())
    driver.add("a", LONG, SEEDED)
    for taken in ("a", "a#3"):
        with pytest.raises(RequestError, match=f"'{taken}' is in use"):
            driver.engine.add_request(taken, LONG, SEEDED)
        with pytest.raises(RequestError, match=f"'{taken}' is in use"):
            driver.engine.add_request(taken, LONG)
    driver.add("b#1", LONG, SEEDED.model_copy(update={"n": 1}))
    with pytest.raises(RequestError, match="'b#1' is in use"):
        driver.engine.add_request("b", LONG, SEEDED)
    driver.finish()
    driver.add("a", LONG, SEEDED)
    driver.finish()
    EngineProbe(driver).assert_clean()


def test_greedy_choices_are_equal() -> None:
    with scripted(mixed(), "mixed").llm() as llm:
        (output,) = llm.generate([P(20, 1)], SamplingParams(n=3, temperature=0, max_tokens=5))
    first, second, third = ids(output)
    assert first == second == third


def test_a_deadline_ends_all_choices() -> None:
    driver = Driver(dense().engine(tokens=17))
    driver.add("a", LONG, SEEDED, deadline=1e-6)
    driver.finish()
    assert [c.finish_reason for c in driver.final("a").outputs] == ["timeout"] * 4
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("prefix", [True, False])
def test_log_probs_are_those_of_each_choice(prefix: bool) -> None:
    """Of the prompt they are there once, and the others share its pages all the same."""
    params = SEEDED.model_copy(update={"logprobs": 2, "prompt_logprobs": 1})
    driver = Driver(dense().engine(prefix=prefix))
    driver.add("a", LONG, params)
    driver.add("new", LONG, params.model_copy(update={"output_kind": "delta"}))
    driver.finish()
    final = driver.final("a")
    assert len(final.prompt_logprobs or ()) == len(LONG)
    assert [output.prompt_logprobs is not None for output in driver.outputs["new"]][:2] == [True, False]
    assert sum(output.prompt_logprobs is not None for output in driver.outputs["new"]) == 1
    for choice, got in enumerate(final.outputs):
        single = Driver(dense().engine(prefix=prefix))
        single.add("a", LONG, params.model_copy(update={"n": 1}), choice=choice)
        single.finish()
        want = single.result("a")
        assert list(got.token_ids) == list(want.token_ids)
        assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-3)
        assert [list(entry) for entry in got.logprobs or ()] == [list(entry) for entry in want.logprobs or ()]
    assert driver.engine.scheduler.stats.cached_tokens >= 6 * FULL_PAGES
    EngineProbe(driver).assert_clean()


def test_each_choice_goes_its_own_way_through_a_grammar() -> None:
    """All are compiled for; who is ready first computes the prompt."""
    pytest.importorskip("xgrammar")
    params = SEEDED.model_copy(update={"structured_outputs": StructuredOutputsParams(regex="[ab]{9}"), "ignore_eos": False})
    driver = Driver(dense().engine())
    driver.add("a", LONG, params)
    driver.finish()
    texts = [completion.text for completion in driver.final("a").outputs]
    assert [set(text) <= set("ab") and len(text) == 9 for text in texts] == [True] * 4
    assert len(set(texts)) > 1
    assert driver.engine.scheduler.stats.cached_tokens == 3 * FULL_PAGES
    EngineProbe(driver).assert_clean()


# ---- AsyncLLM --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def front() -> Iterator[AsyncLLM]:
    llm = start(rows=8, pages=64)
    yield llm
    llm.close()


async def collect(llm: AsyncLLM, params: SamplingParams, request_id: str | None = None) -> list[RequestOutput]:
    return [output async for output in llm.generate(LONG, params, request_id)]


def test_async_gives_what_llm_gives(front: AsyncLLM, wanted: list[list[int]]) -> None:
    subject: Subject = dense()
    params = SEEDED.model_copy(update={"stop": ["e", "a"], "ignore_eos": False})
    llm: LLM = subject.llm()
    (want,) = llm.generate([LONG], params)
    llm.close()

    async def run() -> None:
        assert ids((await collect(front, SEEDED))[-1]) == wanted
        final, *more = await collect(front, params.model_copy(update={"output_kind": "final_only"}))
        assert not more
        assert final.outputs == want.outputs
        assert (await collect(front, params))[-1].outputs == want.outputs
        logged = (await collect(front, SEEDED.model_copy(update={"logprobs": 1, "prompt_logprobs": 0})))[-1]
        assert [len(completion.logprobs or ()) for completion in logged.outputs] == [10] * 4
        assert len(logged.prompt_logprobs or ()) == len(LONG)
        text = [""] * 4
        for output in await collect(front, params.model_copy(update={"output_kind": "delta"})):
            for completion in output.outputs:
                text[completion.index] += completion.text
        assert text == [completion.text for completion in want.outputs]

    asyncio.run(run())
    assert front.stats().cached_tokens >= 3 * FULL_PAGES


def test_async_abort_ends_all_choices(front: AsyncLLM) -> None:
    async def run() -> RequestOutput:
        last = None
        async for output in front.generate(LONG, SEEDED.model_copy(update={"max_tokens": 150}), "mine"):
            if last is None:
                front.abort("mine")
            last = output
        assert last is not None
        return last

    output = asyncio.run(run())
    assert output.finished
    assert {completion.finish_reason for completion in output.outputs} == {"abort"}
    assert front._link.num_open == 0
