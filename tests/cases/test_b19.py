"""B19: positions that the prefix cache served had leftover log-probs of earlier requests, or the engine failed."""

from __future__ import annotations

import pytest
import torch

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, dense
from modelrunner.testing.subjects import REFERENCE

PLAIN = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
ASKS = PLAIN.model_copy(update={"prompt_logprobs": 2})
REQUESTS = {"X": (P(50, 1), PLAIN), "Y": (P(50, 1), ASKS), "Z": ([*P(50, 1)[:33], 60, 61, 62, 63, 64], ASKS)}


def numbers(driver: Driver, name: str) -> list[dict[int, float]]:
    found = driver.final(name).prompt_logprobs
    assert found is not None
    return [{token: given.logprob for token, given in each.items()} for each in found[1:] if each is not None]


@pytest.mark.parametrize("order", ["XYZY", "ZYXY"])
def test_every_list_is_complete(order: str, device: str) -> None:
    alone = Driver(dense().engine(**REFERENCE))
    for name in "YZ":
        alone.add(name, *REQUESTS[name])
        alone.finish()
    driver = Driver(dense().engine(depth=2, device=device))
    probe = EngineProbe(driver)
    probe.poison_freed_pages()
    for ring in (driver.engine.runner.logprobs.rows, driver.engine.runner.logprobs.positions):
        ring.packed.view(torch.float32).fill_(torch.nan)
    for place, name in enumerate(order):
        label = f"{place}{name}"
        driver.add(label, *REQUESTS[name])
        driver.finish()
        if name == "X":
            continue
        got, want = numbers(driver, label), numbers(alone, name)
        assert len(got) == len(want) == len(REQUESTS[name][0]) - 1
        assert driver.final(label).num_cached_tokens == 0
        for one, other in zip(got, want, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
    driver.add("later", P(50, 1), PLAIN)
    driver.finish()
    assert driver.final("later").num_cached_tokens >= 32
    probe.assert_clean()
