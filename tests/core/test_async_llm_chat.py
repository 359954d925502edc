"""Conversations through AsyncLLM: the outputs and the refusals of LLM.chat, and its streams."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from engine_world import engine_processes, outputs, run, start, until

from modelrunner import LLM, AsyncLLM, RequestOutput, SamplingParams
from modelrunner.async_llm import LONG_TEXT
from modelrunner.errors import RequestError
from modelrunner.testing import ByteTokenizer, dense, options

SHORT: dict[str, Any] = {"rows": 4, "pages": 64, "tokens": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ONE = [{"role": "user", "content": "hi"}]
TALK = [*ONE, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "who are you?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = start(**SHORT)
    yield llm
    llm.close()
    assert engine_processes() == []


@pytest.fixture(scope="module")
def plain() -> LLM:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*max_model_len.*")
        return LLM(dense().model, plugins=dense().plugins, **options(**SHORT))


async def answers(llm: AsyncLLM, messages: Any, params: SamplingParams | None = None, **named: Any) -> list[RequestOutput]:
    return [output async for output in llm.chat(messages, params, **named)]


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("kind", ["delta", "cumulative", "final_only"])
def test_answers_are_those_of_llm(llm: AsyncLLM, plain: LLM, kind: str, prompted: bool) -> None:
    params = GREEDY.model_copy(update={"output_kind": kind, "stop": ["zq"]})
    for messages in (ONE, TALK):
        [want] = plain.chat(messages, params, use_tqdm=False, add_generation_prompt=prompted)
        got = run(answers(llm, messages, params, request_id="mine", add_generation_prompt=prompted))
        assert {(output.request_id, tuple(output.prompt_token_ids)) for output in got} == {("mine", tuple(want.prompt_token_ids))}
        texts = [output.outputs[0].text for output in got]
        assert ("".join(texts) if kind == "delta" else texts[-1]) == want.outputs[0].text
        assert got[-1].finished
    assert llm.default_sampling_params() == plain.default_sampling_params()
    assert run(answers(llm, ONE))[-1].finished


BAD: dict[str, Any] = {
    "text": "hi",
    "bytes": b"hi",
    "one message": ONE[0],
    "a number": 5,
    "no role": [{"content": "x"}],
    "no content": [{"role": "user"}],
    "a picture": [{"role": "user", "content": [{"type": "image_url"}]}],
    "too long": [{"role": "user", "content": "x" * 300}],
    "long enough for a thread": [{"role": "user", "content": "x" * (LONG_TEXT + 1)}],
    "a thread, and no role": [{"content": "x" * (LONG_TEXT + 1)}],
}


@pytest.mark.parametrize("case", BAD)
def test_bad_messages_get_the_message_of_llm(llm: AsyncLLM, plain: LLM, case: str) -> None:
    with pytest.raises(RequestError) as here:
        plain.chat(BAD[case], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError) as there:
        run(answers(llm, BAD[case], GREEDY))
    assert str(there.value) == str(here.value).removeprefix("prompts[0]: ")


def test_several_conversations_are_several_calls(llm: AsyncLLM) -> None:
    for several in ([ONE, TALK], [ONE]):
        with pytest.raises(
            RequestError, match=rf"messages: got {len(several)} conversations; accepted: one, a list of mappings with 'role'"
        ):
            run(answers(llm, several, GREEDY))

    async def both() -> list[list[RequestOutput]]:
        return list(await asyncio.gather(answers(llm, ONE, GREEDY), answers(llm, TALK, GREEDY)))

    assert [len(stream[-1].outputs[0].token_ids) for stream in run(both())] == [12, 12]


def test_a_chat_needs_a_tokenizer(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "tokenizer", None)
    with pytest.raises(RequestError, match="messages: a chat needs a tokenizer, and skip_tokenizer_init is set"):
        run(answers(llm, ONE, GREEDY))


def test_long_conversations_are_templated_beside_the_event_loop(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    class Noting(ByteTokenizer):
        def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True) -> list[int]:
            threads.append(threading.current_thread())
            return [5, 6]

    monkeypatch.setattr(llm, "tokenizer", Noting())
    for length in (LONG_TEXT, LONG_TEXT + 1):
        run(answers(llm, [{"role": "user", "content": "x" * length}], GREEDY))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


def test_who_leaves_a_chat_takes_the_request_along(llm: AsyncLLM) -> None:
    async def go() -> None:
        before = llm.stats().finished.get("abort", 0)
        stream = llm.chat(ONE, GREEDY.model_copy(update={"max_tokens": 200}), request_id="left")
        await anext(stream)
        await stream.aclose()
        await until(lambda: llm.stats().finished.get("abort", 0) == before + 1)
        assert (await outputs(llm, [5, 6], GREEDY, request_id="left"))[-1].finished

    run(go())
