"""The size of the cache where the device can measure: what is left beside weights, the largest step and the graphs; or a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from modelrunner import Engine, Offer, SamplingParams, hookimpl
from modelrunner.cache_setup import LAYER_BYTES
from modelrunner.devices.deferred import DeferredCpuDevice
from modelrunner.errors import CapacityError
from modelrunner.graphs import KINDS
from modelrunner.testing import ByteTokenizerPlugin, Driver, EngineProbe, P, assert_same, dense, tiny_dense

MIB = 2**20
TOTAL, TAKEN, STEP, BODY = 1000 * MIB, 100 * MIB, 60 * MIB, 8 * MIB
GRAPH = 2 * LAYER_BYTES  # of the two layers of the model
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class SmallDevice(DeferredCpuDevice):
    """A deferred CPU that says it has 1,000 MiB, of which 100 are taken, and that steps of 200 tokens take 60 MiB."""

    name = "small"
    measures = True
    step = STEP
    out_of_memory = False
    measured: list[int]

    def memory(self) -> tuple[int, int]:
        return TOTAL - TAKEN, TOTAL

    def peak(self, work: Callable[[], None]) -> int:
        self.measured = [*getattr(self, "measured", []), 0]
        if self.out_of_memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")
        work()
        return self.step if len(self.measured) == 1 else BODY


class SmallPlugin:
    MODELRUNNER_API = ">=1,<2"

    def __init__(self, **attributes: Any) -> None:
        self.kind = type("SmallDevice", (SmallDevice,), attributes)

    @hookimpl
    def device(self) -> Offer[type[SmallDevice]]:
        return Offer("small", lambda: self.kind, reason="for these tests")


def start(changes: dict[str, Any] | None = None, **attributes: Any) -> Engine:
    settings = {
        "model.name": str(tiny_dense()),
        "device.name": "small",
        "scheduler.max_batched_tokens": 200,
        "scheduler.max_rows": 6,
        "cache.page_size": 4,
        "cache.memory_fraction": 0.2,
        "plugin.deferred_cpu.captures": True,
    }
    return Engine({**settings, **(changes or {})}, plugins=[ByteTokenizerPlugin(), SmallPlugin(**attributes)])


def test_the_cache_gets_what_is_left() -> None:
    """200 MiB may be filled and 100 are; of the rest a step takes 60, a captured one 8, and every graph some more."""
    engine = start()
    runner, resolved = engine.runner, engine.assembly.resolved
    most = 6 * 256 // 4
    assert resolved.num_pages == most, "no more than all rows can use"
    graphs = len(runner.buckets.tokens) + len(runner.buckets.rows) * len(KINDS)
    assert runner.graphs.count == graphs
    left = 100 * MIB - STEP - BODY - graphs * GRAPH
    assert f"the largest step (200 tokens, 6 rows) {60 / 1024:.2f} GiB" in resolved.memory
    assert f"left for the cache {left / 2**30:.2f} GiB; 0.20 GiB of 0.98 GiB may be filled" in resolved.memory
    assert resolved.memory in str(resolved)


def test_a_tight_cache_is_exact_and_works() -> None:
    """The caches of the start are replaced: what was captured, and every step, works on the new ones."""
    free = start().runner
    spare = 100 * MIB - BODY - free.graphs.count * GRAPH
    page = start().assembly.resolved.page_bytes
    engine = start(step=spare - 41 * page - page // 2)
    assert engine.assembly.resolved.num_pages == 40, "one more is the null page"
    assert engine.assembly.arena.tensor.shape == (41, page)
    caches, backends = engine.runner.parts.caches, engine.runner.parts.backends
    assert all(backends[name].cache is cache for name, cache in caches.items())
    assert all(cache.untyped_storage().data_ptr() == engine.assembly.arena.tensor.data_ptr() for cache in caches.values())
    driver = Driver(engine)
    probe = EngineProbe(driver)
    for k in range(5):
        driver.add(str(k), P(9 + 7 * k, k), GREEDY)
        driver.step()
    driver.finish()
    for k in range(5):
        assert_same(dense(), P(9 + 7 * k, k), GREEDY, driver.result(str(k)))
    probe.assert_clean()


def test_a_model_that_does_not_fit_is_told_in_numbers() -> None:
    with pytest.raises(CapacityError) as caught:
        start(step=99 * MIB)
    text = str(caught.value)
    assert "does not fit on device 'small'" in text
    assert f"(200 tokens, 6 rows) {99 / 1024:.2f} GiB" in text
    for part in ("weights 0.00 GiB", "graphs", "buffers and others", "left for the cache -0.0", "0.98 GiB may be filled"):
        assert part in text
    assert "lower scheduler.max_batched_tokens or scheduler.max_rows" in text
    assert "raise cache.memory_fraction (now 0.2)" in text


def test_memory_that_runs_out_in_the_largest_step() -> None:
    message = (
        r"ran out of memory in the largest step, of 200 tokens and 6 rows: 0.88 GiB of 0.98 GiB .*Lower .*\(CUDA out of memory\. Tried"
    )
    with pytest.raises(CapacityError, match=message):
        start(out_of_memory=True)


@pytest.mark.parametrize("given", [{"cache.num_pages": 30}, {"cache.memory_bytes": 200_000}])
def test_a_given_size_is_not_measured(given: dict[str, Any]) -> None:
    engine = start(given)
    assert not hasattr(engine.assembly.device, "measured")
    assert engine.assembly.resolved.memory == ""


def test_what_a_component_cannot_allocate_names_it() -> None:
    from modelrunner.choosing import blaming

    message = r"model_state dense does not fit into the device's memory: .*model\.dtype.*\(out of memory\)"
    with pytest.raises(CapacityError, match=message), blaming("model_state dense"):
        raise torch.OutOfMemoryError("out of memory\ntrace")
