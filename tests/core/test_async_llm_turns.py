"""What turns of the engine's loop bring: several outputs of one request, whose log-probs stay with its tokens; counts at its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine_world import last, outputs, run, start, wait_until

from modelrunner import LLM, AsyncLLM, SamplingParams
from modelrunner.errors import RequestError
from modelrunner.request import OutputKind
from modelrunner.testing import P, assert_tokens, dense, options, ref

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


async def told(llm: AsyncLLM, seed: int) -> tuple[int, int, int]:
    """Tokens of one request, how many of them come first in their log-probs, and entries of its prompt's."""
    params = GREEDY.model_copy(update={"logprobs": 1, "prompt_logprobs": 0, "output_kind": OutputKind.DELTA})
    ids: list[int] = []
    first: list[int] = []
    prompt = 0
    async for output in llm.generate(P(20, seed), params):
        ids += output.outputs[0].token_ids
        first += [next(iter(each)) for each in output.outputs[0].logprobs or ()]
        prompt = len(output.prompt_logprobs or ()) or prompt
    return len(ids), sum(one == other for one, other in zip(ids, first, strict=True)), prompt


async def reuse(llm: AsyncLLM) -> None:
    for _ in range(6):
        generator = llm.generate(P(5, 9), GREEDY, "again")
        await anext(generator)
        await generator.aclose()


async def rest(llm: AsyncLLM) -> None:
    for _ in range(3):
        await asyncio.sleep(0.01)
        await llm.sleep()
        await llm.wake_up()


@pytest.mark.parametrize(
    ("beside", "engine"),
    [(reuse, {"rows": 8, "pages": 64}), (rest, {"rows": 8, "pages": 64, "depth": 3}), (None, {"depth": 3, "pages": 9})],
    ids=["an id is used again", "sleep", "preemption"],
)
def test_logprobs_belong_to_their_tokens(beside: Any, engine: dict[str, Any]) -> None:
    llm = start(**engine)

    async def go() -> list[tuple[int, int, int]]:
        other = None if beside is None else asyncio.ensure_future(beside(llm))
        found = await asyncio.gather(*(told(llm, seed) for seed in range(3)))
        if other is not None:
            await other
        return list(found)

    try:
        assert run(go()) == [(60, 60, 20)] * 3
        assert beside is not None or llm.stats().preemptions > 0
    finally:
        llm.close()


def test_tokens_name_the_weights_that_gave_them() -> None:
    """Also where one turn brings tokens from before and after an update, as one does in which an id is used again."""
    llm, params = start(rows=8, pages=128), GREEDY.model_copy(update={"max_tokens": 150, "output_kind": OutputKind.DELTA})

    async def go(seed: int) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        begun = asyncio.Event()

        async def follow() -> None:
            async for output in llm.generate(P(20, seed), params):
                found.extend((token, output.weight_version) for token in output.outputs[0].token_ids)
                if len(found) > 10:
                    begun.set()

        following = asyncio.ensure_future(follow())
        await begun.wait()
        other = llm.generate(P(5, 9), GREEDY, "again")
        await anext(other)
        update = asyncio.ensure_future(llm.update_weights(dense(2).model, "second"))
        await asyncio.sleep(0)
        llm.abort("again")
        assert await last(llm, P(5, 9), SamplingParams(max_tokens=2), request_id="again")
        await asyncio.gather(update, following)
        await other.aclose()
        await llm.update_weights(dense().model, "0")
        return found

    try:
        told = [run(go(seed)) for seed in range(4)]
    finally:
        llm.close()
    parts = [[[token for token, its in each if its == version] for version in ("0", "second")] for each in told]
    assert any(after for _, after in parts)
    for seed, (before, after) in enumerate(parts):
        assert [token for token, _ in told[seed]] == before + after
        for subject, prompt, got in ((dense(), P(20, seed), before), (dense(2), P(20, seed) + before, after)):
            if got:
                want = ref(subject, prompt, GREEDY.model_copy(update={"max_tokens": len(got)}))
                assert_tokens(subject, prompt, got, want.token_ids, greedy=True)


def test_what_cannot_be_sent_is_refused_and_large_numbers_can() -> None:
    llm = start(rows=2, pages=64)
    try:
        half = r"half of a surrogate pair \(U\+D800\); accepted: text that UTF-8 can encode"
        with pytest.raises(RequestError, match=half):
            run(outputs(llm, {"prompt_token_ids": P(5, 1), "cache_salt": "\ud800"}, GREEDY))
        with pytest.raises(RequestError, match=half):
            run(outputs(llm, P(5, 1), GREEDY, request_id="\ud800"))
        with pytest.raises(RequestError, match=r"bad_words: '\\ud800' cannot be encoded"):
            run(outputs(llm, P(5, 1), SamplingParams(bad_words=["\ud800"])))
        for params in (SamplingParams(temperature=0, max_tokens=10**30), SamplingParams(temperature=0, min_tokens=10**30, max_tokens=None)):
            assert run(last(llm, P(5, 1), params)).outputs[0].finish_reason in ("stop", "length")
    finally:
        llm.close()


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (2, 2)])
def test_an_id_of_several_choices_is_in_use_until_their_end(first: int, second: int) -> None:
    llm = start(rows=8, pages=64)

    async def go() -> None:
        owner = llm.generate(P(9, 1), GREEDY.model_copy(update={"n": first, "temperature": 1.0, "seed": 1}), "taken")
        await anext(owner)
        other = GREEDY.model_copy(update={"n": second, "temperature": 1.0, "seed": 2})
        with pytest.raises(RequestError, match="request id 'taken' is in use by an unfinished request; choose another"):
            await last(llm, P(9, 2), other, request_id="taken")
        *_, end = [output async for output in owner]
        assert [len(each.token_ids) for each in end.outputs] == [60] * first
        assert (await last(llm, P(9, 2), other, request_id="taken")).finished
        async for output in llm.generate(P(9, 2), other, "taken"):
            if output.finished:
                break
        assert (await last(llm, P(9, 2), GREEDY, request_id="taken")).finished

    try:
        run(go())
    finally:
        llm.close()


@pytest.mark.parametrize("kind", list(OutputKind))
def test_drafts_of_what_a_stop_string_ended_are_counted_too(kind: OutputKind) -> None:
    """As by LLM. Requests beside it go on; log-probs end where the text does."""
    prompt, free = [7, 8, 9] * 4, GREEDY.model_copy(update={"max_tokens": 60, "logit_bias": {60: 100.0}})
    short: dict[str, Any] = {"rows": 8, "pages": 24, "tokens": 64, "drafter": "ngram"}
    plain = LLM(dense().model, plugins=dense().plugins, **options(**short))
    text = plain.generate([prompt], free)[0].outputs[0].text
    params = free.model_copy(update={"stop": (text[20:24],), "logprobs": 0, "output_kind": kind})
    want = plain.generate([prompt], params)[0].outputs[0]
    assert (want.finish_reason, want.num_accepted > 0) == ("stop", True)
    llm = start(**short)
    try:

        async def go() -> list[Any]:
            return list(await asyncio.gather(outputs(llm, prompt, params), outputs(llm, P(9, 1), free), outputs(llm, prompt, params)))

        stopped, other, again = run(go())
        assert len(other[-1].outputs[0].token_ids) == 60
        for found in (stopped, again):
            end = found[-1].outputs[0]
            ids = [i for each in found for i in each.outputs[0].token_ids] if kind is OutputKind.DELTA else list(end.token_ids)
            logprobs = [i for each in found for i in each.outputs[0].logprobs or ()] if kind is OutputKind.DELTA else list(end.logprobs)
            assert (ids, len(logprobs)) == (list(want.token_ids), len(want.token_ids))
            assert (end.finish_reason, end.stop_reason) == ("stop", want.stop_reason)
            assert end.num_drafted >= end.num_accepted > 0
        wait_until(lambda: llm.stats().running == 0)
    finally:
        llm.close()
