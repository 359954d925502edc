"""A long random run in float32: requests come, are aborted and preempted, and each gets what it gets alone."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import pytest
import torch

from modelrunner import Engine, OutputKind, SamplingParams
from modelrunner.testing import ByteTokenizerPlugin, Driver, EngineProbe, P, assert_tokens, dense, options, tiny_dense
from modelrunner.testing.subjects import REFERENCE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

COMMON = {"max_tokens": 40, "ignore_eos": True, "output_kind": OutputKind.FINAL_ONLY, "detokenize": False}
GREEDY = SamplingParams(temperature=0, **COMMON)
SAMPLED = SamplingParams(temperature=0.8, seed=3, **COMMON)
FILTERED = SamplingParams(temperature=0.8, top_k=30, top_p=0.9, seed=4, **COMMON)
ROWS = 12
Kind = tuple[list[int], SamplingParams]


@dataclass
class RandomRun:
    """Requests of random kinds in one engine. wanted: request -> its kind. Pages are too few for all rows."""

    kinds: list[Kind]
    seed: int
    depth: int
    device: str = "cuda"
    wanted: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = options(device=self.device, depth=self.depth, rows=ROWS, pages=40, tokens=48)
        graphs = {"bucket_rows": (1, 2, 4, 8, 16)}
        settings |= {"model": {"name": str(tiny_dense()), "dtype": "float32"}, "graphs": graphs}
        self.driver = Driver(Engine(settings, plugins=[ByteTokenizerPlugin()]))

    def run(self, steps: int) -> None:
        """So many steps, then what is left."""
        rng, driver, engine, begun = random.Random(self.seed), self.driver, self.driver.engine, time.monotonic()
        for step in range(1, steps + 1):
            if len(engine.requests) < ROWS + 2 and rng.random() < 0.5:
                kind, name = rng.randrange(len(self.kinds)), str(len(self.wanted))
                driver.add(name, *self.kinds[kind])
                self.wanted[name] = kind
            if engine.requests and rng.random() < 0.01:
                engine.abort(rng.choice(list(engine.requests)))
            driver.receive(engine.step())
            if step % 1000 == 0:
                engine.scheduler.check()
                told = f"{step / (time.monotonic() - begun):.0f} a second, {engine.scheduler.stats.preemptions} preemptions"
                print(f"depth {self.depth}: {step} steps, {told}, {len(self.wanted)} requests", flush=True)
        driver.finish()
        EngineProbe(driver).assert_clean()

    def compare(self, alone: list[list[int]]) -> int:
        """Each request's tokens with those of its kind alone; an aborted one has their beginning. Returns how many were aborted."""
        aborted = 0
        for name, kind in self.wanted.items():
            result, (prompt, params) = self.driver.result(name), self.kinds[kind]
            ids = list(result.token_ids)
            aborted += result.finish_reason == "abort"
            assert result.finish_reason == "abort" or len(ids) == len(alone[kind])
            assert_tokens(dense(), prompt, ids, alone[kind][: len(ids)], greedy=params is GREEDY)
        return aborted


def each_alone(kinds: list[Kind]) -> list[list[int]]:
    """The tokens of every kind on the CPU, one request after the other in an engine with one row."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only wait for each other in so small a model
    try:
        driver = Driver(dense().engine(**REFERENCE))
        for number, kind in enumerate(kinds):
            driver.add(str(number), *kind)
        driver.finish()
    finally:
        torch.set_num_threads(threads)
    return [list(driver.result(str(number)).token_ids) for number in range(len(kinds))]


def test_long_random_run_gives_each_request_what_it_gets_alone() -> None:
    """20,000 steps, two in flight; then 2,000 with one."""
    check(seed=5, steps=20_000)


def check(seed: int, steps: int, device: str = "cuda") -> None:
    rng = random.Random(seed)
    kinds = [(P(rng.randint(1, 60), salt), rng.choice((GREEDY, GREEDY, SAMPLED, FILTERED))) for salt in range(24)]
    begun = time.monotonic()
    alone = each_alone(kinds)
    print(f"each alone on the CPU: {time.monotonic() - begun:.1f} s", flush=True)
    for depth, number in ((2, steps), (1, steps // 10)):
        begun = time.monotonic()
        run = RandomRun(kinds, seed, depth, device)
        print(f"depth {depth}: started in {time.monotonic() - begun:.1f} s", flush=True)
        run.run(number)
        aborted = run.compare(alone)
        assert aborted > number // 1000
        assert run.driver.engine.scheduler.stats.preemptions > number // 1000
