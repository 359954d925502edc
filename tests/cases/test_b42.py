"""B42: a client's name for an image paired a cached embedding with a request of another size."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from engine_world import last, run
from mm_world import GREEDY, assert_expected, made
from tiny_mm import mm

from modelrunner import AsyncLLM
from modelrunner.errors import RequestError
from modelrunner.testing import options

SMALL, LARGE = made((5, (4, 4), 7)), made((5, (8, 8), 7))


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    """An arena of 64 embeddings: one large image, or four small ones."""
    subject = mm()
    settings = options(rows=8, pages=64, tokens=32) | {"media": {"arena_tokens": 64}}
    llm = AsyncLLM(subject.model, plugins=subject.plugins, **settings)
    yield llm
    llm.close()


def test_an_image_is_what_it_holds_whatever_it_is_called(llm: AsyncLLM) -> None:
    async def main() -> None:
        for one in (SMALL, LARGE, SMALL):
            output = await last(llm, one.prompt(multi_modal_uuids={"image": ["m1"]}), GREEDY)
            assert_expected(one, output.outputs[0])

    run(main())


def test_a_name_without_data_is_refused(llm: AsyncLLM) -> None:
    async def main() -> None:
        given = {"prompt_token_ids": SMALL.short, "multi_modal_data": {"image": [None]}, "multi_modal_uuids": {"image": ["m1"]}}
        with pytest.raises(RequestError, match="'m1' comes without its image"):
            await last(llm, given, GREEDY)
        output = await last(llm, SMALL.prompt(), GREEDY)
        assert_expected(SMALL, output.outputs[0])

    run(main())


def test_thirty_images_and_the_first_again_from_eight_clients(llm: AsyncLLM) -> None:
    many = [made((5, (4, 4), 7), seed) for seed in range(30)]
    encoded = llm.stats().encoded

    async def client(number: int, bad: bool) -> None:
        for one in [*many[number::8], many[0]]:
            output = await last(llm, one.prompt(multi_modal_uuids={"image": [f"m{number % 2}"]}), GREEDY)
            assert_expected(one, output.outputs[0])
            if bad:
                broken: Any = {"prompt_token_ids": one.short, "multi_modal_data": {"image": b"broken"}}
                with pytest.raises(RequestError, match="cannot be decoded"):
                    await last(llm, broken, GREEDY)

    async def main() -> None:
        await asyncio.gather(*(client(number, number % 3 == 0) for number in range(8)))
        assert llm.health()

    run(main())
    assert llm.stats().encoded - encoded >= 20, "the arena holds four of them"
