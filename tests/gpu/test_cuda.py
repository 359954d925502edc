"""The CUDA device with the plain-torch operations: the CPU's tokens, at any depth, and no synchronisation in a step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from modelrunner import OutputKind, SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, assert_same, dense, ref

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
REQUESTS = {str(s): (P(5 + 11 * s, s), GREEDY) for s in range(6)}


@pytest.fixture(autouse=True)
def _float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELRUNNER_MODEL__DTYPE", "float32")


def run(depth: int, **options: object) -> Driver:
    driver = Driver(dense().engine(device="cuda", depth=depth, **options))
    for name, (prompt, params) in REQUESTS.items():
        driver.add(name, prompt, params)
    driver.finish()
    EngineProbe(driver).assert_clean()
    return driver


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_equal_the_cpu(depth: int) -> None:
    driver = run(depth, tokens=32)
    for name, (prompt, params) in REQUESTS.items():
        assert_same(dense(), prompt, params, driver.result(name))


def test_pages_run_out_and_requests_resume() -> None:
    driver = run(2, tokens=32, pages=9, rows=4)
    assert driver.engine.scheduler.stats.preemptions > 0
    for name, (prompt, params) in REQUESTS.items():
        assert_same(dense(), prompt, params, driver.result(name))


def test_sampled_tokens_equal_the_cpu() -> None:
    params = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.02, seed=7, max_tokens=16, ignore_eos=True)
    driver = Driver(dense().engine(device="cuda"))
    driver.add("a", P(12, 1), params)
    driver.finish()
    assert list(driver.result("a").token_ids) == list(ref(dense(), P(12, 1), params).token_ids)


def test_bfloat16_gives_the_same_tokens_at_every_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default type of a GPU. The batch is fixed: all requests are there before the first step."""
    monkeypatch.setenv("MODELRUNNER_MODEL__DTYPE", "bfloat16")
    plain, deep = run(1), run(3)
    assert all(plain.result(name).token_ids == deep.result(name).token_ids for name in REQUESTS)


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_steps_do_not_synchronise(no_synchronisation: None, temperature: float) -> None:
    """Everything but the wait for an earlier step's copy, which is an event and which the mode does not count."""
    params = SamplingParams(temperature=temperature, top_p=0.9, max_tokens=64, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
    driver = Driver(dense().engine(device="cuda", depth=2, tokens=48))
    driver.add("warm", P(60, 9), params)
    driver.finish()
    torch.cuda.set_sync_debug_mode("error")
    for name, (prompt, _) in REQUESTS.items():
        driver.add(name, prompt, params)
    driver.finish()
    assert all(driver.is_finished(name) for name in REQUESTS)
