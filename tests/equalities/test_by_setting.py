"""Settings reach the running engine: padding changes no token, weights and cache take the type asked for, the cache takes its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from modelrunner import Engine, SamplingParams
from modelrunner.batch import Plan
from modelrunner.errors import CapacityError
from modelrunner.linear import Linear
from modelrunner.testing import ByteTokenizerPlugin, Driver, EngineProbe, P, assert_same, dense, options, tiny_dense

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)
REQUESTS = [(P(5 + 9 * k, k), SAMPLED if k % 3 == 2 else GREEDY) for k in range(6)]


def start(changes: dict[str, Any], **short: Any) -> Driver:
    return Driver(Engine({"model": {"name": str(tiny_dense())}} | options(**short) | changes, plugins=[ByteTokenizerPlugin()]))


def run(driver: Driver) -> None:
    for k, (prompt, params) in enumerate(REQUESTS):
        driver.add(str(k), prompt, params)
        driver.step()
    driver.finish()
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(("rows", "tokens"), [((8,), (64,)), ((2, 4, 8), (16, 32, 64)), ((16,), ()), ((), (64,))])
def test_padding_changes_no_token(depth: int, rows: Sequence[int], tokens: Sequence[int]) -> None:
    driver = start(
        {"graphs": {"bucket_rows": rows, "bucket_tokens": tokens}}, device="deferred_cpu", depth=depth, rows=4, tokens=33, pages=16
    )
    runner = driver.engine.runner
    padded: set[str] = set()
    launch = runner.launch

    def watched(plan: Plan) -> Any:
        shape = runner.buckets.shape(plan)
        kind = "decode" if plan.num_decode == plan.num_rows else "mixed"
        if (shape.num_rows, shape.num_tokens) != (plan.num_rows, plan.num_tokens):
            padded.add(kind)
        return launch(plan)

    runner.launch = watched  # type: ignore[method-assign]
    run(driver)
    assert padded == ({"decode", "mixed"} if rows else {"mixed"}), "otherwise nothing was tested"
    for k, (prompt, params) in enumerate(REQUESTS):
        assert_same(dense(), prompt, params, driver.result(str(k)))


def test_int8_weights_by_setting() -> None:
    """Whichever plugin supplies them."""
    driver = start({"linear": {"scheme": "int8"}}, device="deferred_cpu")
    assert driver.engine.assembly.resolved.components["linear_scheme"].startswith("int8 ")
    linears = [layer for layer in driver.engine.assembly.state.module.modules() if isinstance(layer, Linear)]
    assert len(linears) == 2 * 4 + 1
    assert {layer.scheme.name for layer in linears} == {"int8"}
    assert not [parameter for layer in linears for parameter in layer.parameters()], "no float weights are kept"
    run(driver)
    alone = start({"linear": {"scheme": "int8"}}, depth=1, rows=1)
    alone.add("0", *REQUESTS[0])
    alone.finish()
    assert list(alone.result("0").token_ids)[:4] == list(driver.result("0").token_ids)[:4]


@pytest.mark.parametrize(("weights", "cache"), [("bfloat16", "auto"), ("float32", "bfloat16"), ("float16", "float32")])
def test_types_of_weights_and_cache(weights: str, cache: str) -> None:
    plain, driver = start({}), start({"model": {"name": str(tiny_dense()), "dtype": weights}, "cache": {"num_pages": 64, "dtype": cache}})
    resolved, stored = driver.engine.assembly.resolved, weights if cache == "auto" else cache
    assert (resolved.dtype, resolved.cache_dtype) == (weights, stored)
    assert {parameter.dtype for parameter in driver.engine.assembly.state.module.parameters()} == {getattr(torch, weights)}
    assert {tensor.dtype for tensor in driver.engine.runner.parts.caches.values()} == {getattr(torch, stored)}
    assert resolved.page_bytes == plain.engine.assembly.resolved.page_bytes // (1 if stored == "float32" else 2)
    run(driver)
    first = [assert_first(driver, k) for k in range(len(REQUESTS))]
    assert sum(first) >= 5, "rounding may turn a near-tie, not most tokens"


def assert_first(driver: Driver, k: int) -> bool:
    """Whether the first token is the one of float32; the length is right in any case."""
    result = driver.result(str(k))
    assert len(result.token_ids) == 12
    want = Driver(dense().engine(depth=1, rows=1))
    want.add("a", *REQUESTS[k])
    want.finish()
    return result.token_ids[0] == want.result("a").token_ids[0]


def test_the_cache_takes_its_bytes() -> None:
    page = start({}).engine.assembly.resolved.page_bytes
    pages = start({"cache": {"memory_bytes": 41 * page + page // 2}}).engine.assembly.resolved.num_pages
    assert pages == 40, "one more is the null page"
    most = start({"cache": {"memory_bytes": 10_000 * page}}, rows=2).engine.assembly.resolved.num_pages
    assert most == 2 * 256 // 16, "two rows at full length"
    with pytest.raises(CapacityError, match=rf"2 pages of {page} bytes.*cache\.memory_bytes"):
        start({"cache": {"memory_bytes": 2 * page - 1}})
    start({"cache": {"memory_fraction": 0.5}})  # whatever the host has free
