"""Start-up shows the device all that it will launch, and then starts as if it had not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from modelrunner import Engine, Offer, SamplingParams, hookimpl
from modelrunner.device import Device
from modelrunner.graphs import BUILT
from modelrunner.testing import ByteTokenizerPlugin, Driver, P, assert_same, dense, options, tiny_dense
from modelrunner.testing.null_device import NullDevice


class Builder(NullDevice):
    """Runs what it is to build. built: how much that was."""

    name = "builder"
    built = 0

    def build(self, work: Sequence[Callable[[], None]]) -> None:
        for part in work:
            with torch.inference_mode():
                part()
        self.built += len(work)


class BuilderPlugin:
    MODELRUNNER_API = ">=1,<2"

    @hookimpl
    def device(self) -> Offer[type[Device]]:
        return Offer("builder", lambda: Builder, fit="fallback", reason="for a test")


def test_everything_that_start_up_runs_is_built_before() -> None:
    settings = {"model": {"name": str(tiny_dense())}, "graphs": {"bucket_rows": (1, 2, 4), "bucket_tokens": (16, 64)}} | options(
        device="builder", rows=4
    )
    driver = Driver(Engine(settings, plugins=[ByteTokenizerPlugin(), BuilderPlugin()]))
    device = driver.engine.assembly.device
    assert isinstance(device, Builder)
    # Tails that the warm-up tries, and log-probs alone; prompts; numbers of rows by kinds of tail, bodies; tails for few rows and for many.
    beside = len(driver.engine.assembly.sampler.loading())
    assert device.built == 6 + 3 + 6 + 2 + 2 * len(BUILT) + beside
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for k in range(5):
        driver.add(str(k), P(3 + 9 * k, k), params)
    driver.finish()
    for k in range(5):
        assert_same(dense(), P(3 + 9 * k, k), params, driver.result(str(k)))
