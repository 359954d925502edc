"""Captured steps on a GPU: the same bits as eager ones, no waiting, no allocation, no growth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from modelrunner import Engine, OutputKind, SamplingParams
from modelrunner.graphs import Key
from modelrunner.testing import ByteTokenizerPlugin, Driver, EngineProbe, P, options, tiny_dense

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
FILTERED = SamplingParams(temperature=0.8, top_k=30, top_p=0.9, seed=4, max_tokens=40, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
TYPES = [("bfloat16", "auto"), ("float16", "auto"), ("float32", "auto"), ("bfloat16", "fp8")]  # of the model and of its cache
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc", "cuModuleLoad", "cudaMemcpy")


def start(dtype: str = "bfloat16", eager: bool = False, **short: Any) -> Driver:
    buckets = {"bucket_rows": (1, 2, 4, 8, 16), "bucket_tokens": (16, 32, 64, 512)}
    settings = options(device="cuda", **short) | {"graphs": {"eager": eager} | buckets}
    return Driver(Engine({"model": {"name": str(tiny_dense()), "dtype": dtype}} | settings, plugins=[ByteTokenizerPlugin()]))


def tokens(driver: Driver, params: SamplingParams) -> list[tuple[int, ...]]:
    """Output ids of a fixed batch: every request is there before the first step."""
    for k in range(7):
        driver.add(str(k), P(5 + 11 * k, k), params)
    driver.finish()
    EngineProbe(driver).assert_clean()
    return [tuple(driver.result(str(k)).token_ids) for k in range(7)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize(("dtype", "kept"), TYPES)
def test_a_graph_is_its_eager_step_and_depth_changes_nothing(dtype: str, kept: str, params: SamplingParams) -> None:
    """On the same padded buckets, bit for bit."""
    graphs = start(dtype, depth=2, cache_dtype=kept)
    assert "captured" in graphs.engine.assembly.resolved.graphs
    want = tokens(start(dtype, eager=True, depth=1, cache_dtype=kept), params)
    assert tokens(graphs, params) == want
    assert tokens(start(dtype, depth=3, cache_dtype=kept), params) == want


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize(("dtype", "kept"), TYPES)
def test_a_mixed_graph_is_its_eager_step(dtype: str, kept: str, params: SamplingParams) -> None:
    """Prompts in chunks beside rows that decode: body and tail as graphs give the bits of the eager step, at every depth."""
    graphs = start(dtype, depth=2, tokens=48, cache_dtype=kept)
    runs = count_runs(graphs)
    want = tokens(start(dtype, eager=True, depth=1, tokens=48, cache_dtype=kept), params)
    assert tokens(graphs, params) == want
    assert tokens(start(dtype, depth=3, tokens=48, cache_dtype=kept), params) == want
    assert runs["body"] == runs["tail"] >= 5
    assert runs["step"] > 20


def count_runs(driver: Driver) -> Counter[str]:
    """Counts the graphs that run, by part of a step."""
    graphs, counts = driver.engine.runner.graphs, Counter[str]()
    run = graphs.run

    def counted(key: Key) -> None:
        counts[key.part] += 1
        run(key)

    graphs.run = counted  # type: ignore[method-assign]
    return counts


@pytest.fixture
def steady() -> Iterator[Driver]:
    """An engine with requests that decode, all graphs in use."""
    driver = start(depth=2)
    for k in range(8):
        params = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
        driver.add(str(k), P(4, k), params)
    for _ in range(12):
        driver.engine.step()
    yield driver
    torch.cuda.set_sync_debug_mode("default")


def test_two_hundred_steps_wait_for_nothing_but_their_events(steady: Driver) -> None:
    assert_no_wait(steady, lambda step: None, steps=200, launches=200)


def test_steps_with_prompts_wait_for_nothing_either() -> None:
    """Two prompts come in each third step and are soon answered; by then every shape has been met twice, so all of it is captured.

    Then a step with prompts is two graphs, body and tail, and every other is one.
    """
    driver = start(depth=2, rows=16)
    runs = count_runs(driver)
    driver.add("long", P(4, 1), SamplingParams(temperature=0, max_tokens=250, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY))

    def arrive(step: int) -> None:
        for k in (0, 1) if step % 3 == 0 else ():
            driver.engine.add_request(f"{driver.steps}-{step}-{k}", {"prompt_token_ids": P(20 + k, step % 7)}, SHORT)

    for step in range(60):
        arrive(step)
        driver.engine.step()
    driver.steps = 1  # names the requests of the second round
    runs.clear()
    assert_no_wait(driver, arrive, steps=120, launches=160)
    assert runs == {"step": 80, "body": 40, "tail": 40}


def assert_no_wait(driver: Driver, before: Callable[[int], None], steps: int, launches: int) -> None:
    """Run steps, each after `before`; none may wait, allocate or load a module, and so many graphs must be launched."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.set_sync_debug_mode("error")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for step in range(steps):
            before(step)
            driver.engine.step()
        torch.cuda.set_sync_debug_mode("default")
    calls = {event.key: event.count for event in trace.key_averages()}
    assert calls.get("cudaGraphLaunch", 0) >= launches, calls
    events = calls.pop("cudaDeviceSynchronize", 0)  # the profiler's own, at its ends
    assert events <= 2
    waits = {name: count for name, count in calls.items() if name.startswith(WAITS) and not name.startswith("cudaMemcpyAsync")}
    assert not waits, waits


def test_memory_does_not_grow() -> None:
    driver = start(depth=2, rows=16)
    number, seen = 0, []
    for step in range(5000):
        while len(driver.engine.requests) < 16:
            driver.engine.add_request(str(number), {"prompt_token_ids": P(3 + number % 50, number % 7)}, (GREEDY, SAMPLED)[number % 2])
            number += 1
        driver.engine.step()
        if step in (2000, 4999):
            seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert seen[0] == seen[1]
