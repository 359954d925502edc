"""With keys and values in 8 bits too, depth, graphs, chunks, company, the prefix cache and preemption change no token.

A key or value is read as it is kept, by its own step too, so there is one number to agree on. The sums before it is rounded may differ in
their last bits, and then, once in some hundred thousand numbers, it is rounded the other way; in these requests that changes nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, dense, ref

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=16, ignore_eos=True)
REQUESTS = [(P(5 + 11 * k, k % 2), SAMPLED if k % 3 == 2 else GREEDY) for k in range(7)]
CALM = {"pages": 64, "rows": 7, "prefix": False, "chunked": False, "depth": 1}


def run(preempt: bool = False, **short: Any) -> tuple[list[list[int]], EngineProbe]:
    driver = Driver(dense().engine(**CALM | {"page_size": 8, "device": "deferred_cpu", "cache_dtype": "fp8"} | short))
    probe = EngineProbe(driver)
    probe.poison_freed_pages()
    for k, (prompt, params) in enumerate(REQUESTS):
        driver.add(str(k), prompt, params)
        driver.step()
        if preempt and k in (3, 5):
            probe.drain()
            probe.preempt(next(name for name in driver.engine.requests if probe.row_of(name) >= 0))
    driver.finish()
    probe.assert_clean()
    return [list(driver.result(str(k)).token_ids) for k in range(len(REQUESTS))], probe


@pytest.fixture(scope="module")
def calm() -> list[list[int]]:
    return run()[0]


CHANGES: dict[str, dict[str, Any]] = {
    "depth 2": {"depth": 2},
    "depth 3": {"depth": 3},
    "graphs": {"depth": 2, "captures": True},
    "chunked": {"chunked": True, "tokens": 13, "mixed_tokens": 7},
    "alone": {"rows": 1},
    "prefix cache": {"prefix": True},
    "preempted": {"preempt": True},
    "all": {"depth": 3, "captures": True, "chunked": True, "tokens": 21, "prefix": True, "preempt": True, "pages": 28},
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_no_token(calm: list[list[int]], name: str) -> None:
    tokens, probe = run(**CHANGES[name])
    assert tokens == calm
    counters = probe.counters()
    assert (counters.cached_tokens > 0) == CHANGES[name].get("prefix", False) or "preempt" in CHANGES[name]
    assert (counters.preemptions > 0) == CHANGES[name].get("preempt", False)


def test_the_cache_is_another_one(calm: list[list[int]]) -> None:
    """Most requests begin as they do with a cache of float32, and some part from it: else nothing was tested."""
    plain = [list(ref(dense(), prompt, params).token_ids) for prompt, params in REQUESTS]
    assert sum(a[0] == b[0] for a, b in zip(calm, plain, strict=True)) >= 6
    assert calm != plain
