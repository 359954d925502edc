"""B57: the front process said that all was well while the engine was dead or frozen. Here with an engine process; the server waits."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_world import Tamper, engine_processes, gone, last, run, start, until

from modelrunner import AsyncLLM, SamplingParams
from modelrunner.errors import EngineError
from modelrunner.testing import P, assert_same, dense

PARAMS = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
STALL_LIMIT = 6.0
pytestmark = pytest.mark.slow


@pytest.fixture
def tamper(tmp_path: Path) -> Tamper:
    return Tamper(tmp_path)


@pytest.fixture
def llm(tamper: Tamper) -> Iterator[AsyncLLM]:
    llm = start(plugins=(tamper,), stall_limit=STALL_LIMIT, tokens=8)
    yield llm
    llm.close()
    assert engine_processes() == []


def test_a_killed_engine(llm: AsyncLLM, tamper: Tamper) -> None:
    """(a) Not healthy, the open request ends with an error, new ones are refused."""

    async def go() -> None:
        tamper.on("slow")
        client = asyncio.create_task(last(llm, P(9, 1), PARAMS))
        await until(lambda: llm.stats().running == 1)
        await until(llm.health)
        assert llm.pid is not None
        os.kill(llm.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=rf"the engine process \(pid {llm.pid}\) was killed by signal 9 \(SIGKILL\)"):
            await client
        assert not llm.health()
        with pytest.raises(EngineError, match="SIGKILL"):
            await last(llm, P(9, 2), PARAMS)
        assert gone(llm.pid)

    run(go())


def test_a_frozen_engine_and_one_that_turns_on_the_spot(llm: AsyncLLM, tamper: Tamper) -> None:
    """(b), (c), with a request in flight: not healthy within the stall limit, healthy when tokens flow again. Then frozen while idle."""

    async def becomes(healthy: bool) -> float:
        begun = time.monotonic()
        await until(lambda: llm.health() is healthy)
        return time.monotonic() - begun

    async def go() -> None:
        assert llm.pid is not None
        tamper.on("slow")
        client = asyncio.create_task(last(llm, P(9, 1), PARAMS))
        await until(lambda: llm.stats().generated_tokens > 0)
        os.kill(llm.pid, signal.SIGSTOP)
        assert await becomes(False) < STALL_LIMIT + 60, "the limit, and time for a slow machine"
        assert "no token was computed for 1 open requests" in str(llm.problem())
        os.kill(llm.pid, signal.SIGCONT)
        await becomes(True)
        tamper.on("stall")
        await until(lambda: llm.stats().running == 1)
        turns = llm.stats().turns
        assert await becomes(False) < STALL_LIMIT + 60
        assert llm.stats().turns > turns, "the loop did turn"
        tamper.off("stall")
        await becomes(True)
        tamper.off("slow")
        assert_same(dense(), P(9, 1), PARAMS, (await client).outputs[0])
        await until(lambda: llm.stats().running == 0)
        os.kill(llm.pid, signal.SIGSTOP)
        assert await becomes(False) < STALL_LIMIT + 60
        assert "the idle engine process was silent" in str(llm.problem())
        os.kill(llm.pid, signal.SIGCONT)
        await becomes(True)

    run(go())


def test_a_long_prefill_and_a_long_rest_are_healthy(llm: AsyncLLM, tamper: Tamper) -> None:
    """(d), (e): a prompt in 29 chunks of at least 0.3 seconds, and a rest, both longer than the stall limit."""

    async def go() -> None:
        tamper.on("slow")
        ill: list[str] = []

        async def watch() -> None:
            while True:
                if (problem := llm.problem()) is not None:
                    ill.append(problem)
                await asyncio.sleep(0.05)

        watcher = asyncio.create_task(watch())
        begun = time.monotonic()
        prompt = P(230, 1)
        end = await last(llm, prompt, PARAMS.model_copy(update={"max_tokens": 4}))
        assert time.monotonic() - begun > STALL_LIMIT
        assert_same(dense(), prompt, PARAMS.model_copy(update={"max_tokens": 4}), end.outputs[0])
        rest = time.monotonic()
        while time.monotonic() - rest < STALL_LIMIT + 2:
            await asyncio.sleep(0.1)
        watcher.cancel()
        assert ill == []

    run(go())
