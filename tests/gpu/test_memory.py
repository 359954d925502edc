"""The cache on a GPU: sized by what the largest step takes, so that the memory that may be filled is neither exceeded nor left empty."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from modelrunner import Engine, SamplingParams
from modelrunner.errors import CapacityError
from modelrunner.testing import ByteTokenizerPlugin, Driver, EngineProbe, P, tiny_dense

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MIB = 2**20
GREEDY = SamplingParams(temperature=0.7, top_k=5, seed=1, max_tokens=20, ignore_eos=True)


def start(spare: int, **more: Any) -> Engine:
    """An engine that may fill `spare` bytes of what is free now."""
    gc.collect()  # the engine of the test before; a new engine would collect it, after what is free was asked for
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    settings = {
        "model.name": str(tiny_dense()),
        "device.name": "cuda",
        "scheduler.max_rows": 2048,
        "scheduler.max_batched_tokens": 16384,
        "cache.memory_fraction": (total - free + spare) / total,
        "graphs.bucket_rows": (16, 512, 2048),
        "graphs.bucket_tokens": (512, 4096),
    }
    return Engine({**settings, **more}, plugins=[ByteTokenizerPlugin()])


def test_full_steps_stay_within_what_may_be_filled() -> None:
    engine = start(700 * MIB)
    total = torch.cuda.mem_get_info()[1]
    allowed = total * engine.settings.cache.memory_fraction
    arena = engine.assembly.arena.tensor.numel()
    driver = Driver(engine)
    for k in range(2200):
        driver.add(str(k), P(60, k % 9), GREEDY)
    most = 0
    while engine.has_unfinished():
        driver.receive(engine.step())
        free, _ = torch.cuda.mem_get_info()
        most = max(most, total - free)
    EngineProbe(driver).assert_clean()
    report = f"{engine.assembly.resolved}; cache {arena / MIB:.0f} MiB, most {most / MIB:.0f} of {allowed / MIB:.0f} MiB"
    assert arena > 100 * MIB, report
    assert most <= allowed + 32 * MIB, report
    assert most >= allowed - 300 * MIB, report


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(CapacityError, match=r"does not fit on device 'cuda'.*weights .*the largest step \(16384 tokens, 2048 rows\)"):
        start(20 * MIB)
