"""B58: when all requests were cancelled at once the gauges froze until new work came. Here by `AsyncLLM.stats`; the server waits."""

from __future__ import annotations

import asyncio

from engine_world import last, run, start, until

from modelrunner import AsyncLLM, SamplingParams
from modelrunner.messages import EngineStats
from modelrunner.testing import P, assert_same, dense

PARAMS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


class Watch:
    """Looks at every report of an engine process and finds counters that decrease."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.seen = llm.stats()

    def look(self) -> EngineStats:
        now = self.llm.stats()
        for name in ("turns", "steps", "preemptions", "prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens"):
            assert getattr(now, name) >= getattr(self.seen, name), f"{name} decreased"
        for reason, count in self.seen.finished.items():
            assert now.finished.get(reason, 0) >= count, f"{reason} decreased"
        self.seen = now
        return now


def test_gauges_and_counters_after_a_mass_abort() -> None:
    llm = start(rows=32, pages=512)
    watch = Watch(llm)

    async def go() -> None:
        clients = [asyncio.create_task(last(llm, P(20, n), PARAMS)) for n in range(42)]
        await until(lambda: watch.look().running == 32 and llm.stats().waiting == 10)
        assert llm.stats().pages_used > 0
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await until(lambda: sum(watch.look().finished.values()) == 42)  # nothing more is sent to the engine
        stats = watch.look()
        assert (stats.running, stats.waiting, stats.pages_used, stats.finished) == (0, 0, 0, {"abort": 42})
        end = await last(llm, P(20, 1), SHORT)
        assert_same(dense(), P(20, 1), SHORT, end.outputs[0])

    try:
        run(go())
    finally:
        llm.close()


def test_prompt_tokens_of_preempted_requests_are_counted_once() -> None:
    """Prompts that are cached, and a pool too small for all of them at their full length."""
    llm = start(rows=4, pages=12)
    watch = Watch(llm)

    async def go() -> None:
        await last(llm, P(33, 1), SHORT)
        await until(lambda: watch.look().finished == {"length": 1})
        before = watch.look()
        tasks = [asyncio.create_task(last(llm, P(33, 1), SHORT)) for _ in range(4)]
        while not all(task.done() for task in tasks):
            watch.look()
            await asyncio.sleep(0.01)
        await until(lambda: watch.look().finished == {"length": 5})
        stats = watch.look()
        assert stats.preemptions > 0
        assert stats.cached_tokens > before.cached_tokens
        assert stats.prompt_tokens - before.prompt_tokens == 4 * 33
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        for task in tasks:
            assert_same(dense(), P(33, 1), SHORT, task.result().outputs[0])

    try:
        run(go())
    finally:
        llm.close()
