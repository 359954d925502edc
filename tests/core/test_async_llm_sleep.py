"""AsyncLLM asleep, and changes that are given up or cut short by the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_world import Tamper, gone, ids, last, run, running, start, tensors, until

from modelrunner import AsyncLLM, SamplingParams
from modelrunner.errors import EngineError
from modelrunner.testing import P, assert_same, assert_tokens, dense, ref

SHORT: dict[str, Any] = {"rows": 8, "pages": 64, "tokens": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)
LONG = GREEDY.model_copy(update={"max_tokens": 200, "output_kind": "delta"})


@pytest.fixture
def llm(changing: AsyncLLM) -> AsyncLLM:
    """The weights are those of dense(1), named "first"."""
    return changing


# ---- sleep -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_requests_sleep_and_go_on(llm: AsyncLLM, tamper: Tamper, params: SamplingParams) -> None:
    """Those that run, those that wait, and those that come meanwhile; abort and deadlines work."""
    tamper.on("slow")
    long = params.model_copy(update={"max_tokens": 30, "output_kind": "delta"})

    async def go() -> None:
        async with running(llm, long, P(20, 1), P(33, 2)) as clients:
            await asyncio.gather(llm.sleep(), llm.sleep())
            tamper.off("slow")
            assert (llm.stats().sleeping, llm.stats().running) == (True, 0)
            new = asyncio.create_task(last(llm, P(20, 1), params))
            aborted = asyncio.create_task(last(llm, P(9, 4), params, request_id="aborted"))
            late = asyncio.create_task(last(llm, P(9, 5), params, deadline=0.05))
            await until(lambda: llm._link.num_open == 5)
            llm.abort("aborted")
            assert (await aborted).outputs[0].finish_reason == "abort"
            assert (await late).outputs[0].finish_reason == "timeout"
            steps = llm.stats().steps
            await asyncio.sleep(0.3)
            assert (llm.stats().steps, llm.stats().pages_used, new.done()) == (steps, 0, False)
            assert llm.health(), llm.problem()
            await asyncio.gather(llm.wake_up(), llm.wake_up())
            assert not llm.stats().sleeping
            for prompt, client in zip((P(20, 1), P(33, 2)), clients, strict=True):
                streamed = await client
                want = ref(dense(1), prompt, long)
                assert_tokens(dense(1), prompt, ids(streamed), want.token_ids, greedy=params.temperature == 0)
                assert streamed[-1].metrics.num_preemptions == 1
            assert_same(dense(1), P(20, 1), params, (await new).outputs[0])

    run(go())


def test_weights_can_be_replaced_in_the_sleep(llm: AsyncLLM) -> None:
    """As a trainer does that needs the cache's memory until then."""

    async def go() -> None:
        await llm.sleep()
        waiting = asyncio.create_task(last(llm, P(20, 1), GREEDY))
        await llm.update_weights(tensors(dense(2)), "second")
        assert llm.stats().sleeping
        await llm.wake_up()
        output = await waiting
        assert output.weight_version == "second"
        assert_same(dense(2), P(20, 1), GREEDY, output.outputs[0])

    run(go())


# ---- going away --------------------------------------------------------------------------------------------------------


def test_an_update_that_is_cancelled_before_its_last_tensor_does_not_take_place(llm: AsyncLLM) -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for pair in tensors(dense(2)):
                begun.set()
                assert go_on.wait(200)
                yield pair
        finally:
            ended.set()

    async def go() -> None:
        update = asyncio.create_task(llm.update_weights(slowly(), "second"))
        await asyncio.to_thread(begun.wait)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        go_on.set()
        await asyncio.to_thread(ended.wait)
        output = await last(llm, P(20, 1), GREEDY)
        assert output.weight_version == "first"
        assert_same(dense(1), P(20, 1), GREEDY, output.outputs[0])

    run(go())


def test_an_update_that_is_cancelled_later_takes_place(llm: AsyncLLM, tamper: Tamper) -> None:
    async def go() -> None:
        tamper.on("load")
        before = llm.stats().loaded_tensors
        update = asyncio.create_task(llm.update_weights(tensors(dense(2)), "second"))
        await until(lambda: llm.stats().loaded_tensors > before)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        tamper.off("load")
        await until(lambda: llm.stats().weight_version == "second")
        assert_same(dense(2), P(20, 1), GREEDY, (await last(llm, P(20, 1), GREEDY)).outputs[0])

    run(go())


@pytest.mark.parametrize("where", ["taking tensors", "loading", "asleep"])
def test_closing_in_the_middle(tmp_path: Path, where: str) -> None:
    """The process ends cleanly, and everybody is told."""
    tamper = Tamper(tmp_path)
    llm = start(dense(1), plugins=(tamper,), **SHORT)
    begun, go_on = threading.Event(), threading.Event()

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in tensors(dense(2)):
            begun.set()
            assert go_on.wait(200)
            yield pair

    async def go() -> None:
        tamper.on("slow")
        async with running(llm, LONG, P(20, 1)) as [client]:
            update: asyncio.Task[None] | None = None
            if where == "asleep":
                await llm.sleep()
            elif where == "loading":
                tamper.on("load")
                update = asyncio.create_task(llm.update_weights(tensors(dense(2))))
                await until(lambda: llm.stats().loaded_tensors > 0)
            else:
                update = asyncio.create_task(llm.update_weights(slowly()))
                await asyncio.to_thread(begun.wait)
            process = llm._link._process
            await asyncio.to_thread(llm.close, 120.0)
            go_on.set()
            assert process is not None
            assert process.returncode == 0, "it was not killed"
            for task in (client, update):
                if task is not None:
                    with pytest.raises(EngineError, match="the engine was closed"):
                        await task

    run(go())
    assert llm.pid is not None
    assert gone(llm.pid)
