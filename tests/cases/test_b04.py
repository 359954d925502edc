"""B04: the scheduler matched cancel ids by prefix, so cancelling one request cancelled its namesakes too."""

from __future__ import annotations

import asyncio

import pytest
from engine_world import last, run, start, until

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, assert_same, dense

NAMES = ["job-1", "job-10", "job-1-x"]
PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def test_abort_matches_the_whole_id() -> None:
    subject = dense()
    driver = Driver(subject.engine(rows=4, device="deferred_cpu"))
    for s, name in enumerate(NAMES, start=1):
        driver.add(name, P(8, s), PARAMS)
    driver.step_until(lambda: all(driver.num_tokens(name) >= 5 for name in NAMES))
    driver.engine.abort("job-1")
    for bad in ("", None):
        with pytest.raises(ValueError, match="id"):
            driver.engine.abort(bad)  # type: ignore[arg-type]
    driver.finish()
    assert driver.result("job-1").finish_reason == "abort"
    assert len(driver.result("job-1").token_ids) < 30
    for s, name in enumerate(NAMES[1:], start=2):
        assert_same(subject, P(8, s), PARAMS, driver.result(name))
        assert len(driver.result(name).token_ids) == 30
    EngineProbe(driver).assert_clean()


def test_abort_matches_the_whole_id_across_processes() -> None:
    """The same through an engine process, whose requests have numbers of its own."""
    subject = dense()
    llm = start(rows=4)

    async def go() -> None:
        tasks = {name: asyncio.create_task(last(llm, P(8, s), PARAMS, request_id=name)) for s, name in enumerate(NAMES, start=1)}
        await until(lambda: llm._link.num_open == 3)
        llm.abort("job-1")
        for bad in ("", None):
            with pytest.raises(ValueError, match="id"):
                llm.abort(bad)  # type: ignore[arg-type]
        ends = {name: (await task).outputs[0] for name, task in tasks.items()}
        assert ends["job-1"].finish_reason == "abort"
        assert len(ends["job-1"].token_ids) < 30
        for s, name in enumerate(NAMES[1:], start=2):
            assert_same(subject, P(8, s), PARAMS, ends[name])
            assert len(ends[name].token_ids) == 30
        await until(lambda: (llm.stats().running, llm.stats().finished) == (0, {"abort": 1, "length": 2}))

    try:
        run(go())
    finally:
        llm.close()
