"""Images and embeddings through an engine process: prepared in the front end, sent in shared memory, and the same as in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from engine_world import last, run, until
from mm_world import GREEDY, assert_expected, made
from tiny_mm import TinyProcessor, mm, weights

from modelrunner import AsyncLLM
from modelrunner.errors import RequestError
from modelrunner.testing import P, options


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    subject = mm()
    settings = options(rows=8, pages=64, tokens=64) | {"media": {"prompt_embeds": True, "arena_tokens": 200}}
    llm = AsyncLLM(subject.model, plugins=subject.plugins, **settings)
    yield llm
    llm.close()


def test_images_text_and_embeddings_side_by_side(llm: AsyncLLM) -> None:
    many = [made((5 + i, (3, 4), 4, (1, 7), 6), i) for i in range(4)] + [made((30,), 9)]
    table = weights()["model.embed_tokens.weight"]

    async def main() -> None:
        embeds = {"prompt_embeds": table[P(40, 1)]}
        plain, given, *outputs = await asyncio.gather(
            last(llm, P(40, 1), GREEDY), last(llm, embeds, GREEDY), *(last(llm, one.prompt(), GREEDY) for one in many)
        )
        assert given.outputs[0].token_ids == plain.outputs[0].token_ids
        for one, output in zip(many, outputs, strict=True):
            assert_expected(one, output.outputs[0])
            assert list(output.prompt_token_ids) == one.full

    run(main())


def test_several_answers_share_the_image(llm: AsyncLLM) -> None:
    one = made((5, (6, 6), 7), 5)
    encoded = llm.stats().encoded

    async def main() -> None:
        params = GREEDY.model_copy(update={"n": 3, "temperature": 1.0, "seed": 3})
        output = await last(llm, one.prompt(), params)
        assert len({tuple(choice.token_ids) for choice in output.outputs}) == 3
        await until(lambda: llm.stats().encoded == encoded + 1)

    run(main())


def test_processing_happens_in_a_thread_of_the_front_end(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    process = TinyProcessor.process

    def watched(self: Any, *arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return process(self, *arguments)

    monkeypatch.setattr(TinyProcessor, "process", watched)
    one = made((5, (4, 4), 7), 8)

    run(last(llm, one.prompt(), GREEDY))
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_what_the_engine_refuses_names_the_limit(llm: AsyncLLM) -> None:
    async def main() -> None:
        with pytest.raises(RequestError, match=r"220 embeddings.*has 200"):
            await last(llm, made((5, (11, 20), 7)).prompt(), GREEDY)
        with pytest.raises(RequestError, match="shape"):
            await last(llm, {"prompt_embeds": weights()["model.embed_tokens.weight"][:, :3]}, GREEDY)

    run(main())


def test_a_request_that_is_given_up_leaves_nothing(llm: AsyncLLM) -> None:
    one = made((5, (6, 6), 7), 6)

    async def main() -> None:
        stream = llm.generate(one.prompt(), GREEDY.model_copy(update={"output_kind": "delta", "max_tokens": 200}))
        async for _ in stream:
            break
        await stream.aclose()
        await until(lambda: llm.stats().running == llm.stats().waiting == 0)
        assert_expected(one, (await last(llm, one.prompt(), GREEDY)).outputs[0])

    run(main())
