"""Work that an engine is measured with by itself, in tokens a second: many requests at once, few, long prompts. Torch-free."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from modelrunner.plugins.bench.scenarios import Job

IDS = 10_000  # prompts are made of the token ids below
WARM_UP = -1  # number of the run that is not timed


@dataclass(frozen=True)
class Arrivals:
    """Prompts that come in while others decode: `requests` of `prompt` tokens, each asking for `output`; one after each `every` steps."""

    requests: int
    prompt: int
    output: int
    every: int


@dataclass(frozen=True)
class Workload:
    """requests: how many, all there at the start. prompt, output: tokens, inclusive bounds between which each request's length is drawn.
    counted: the tokens that make the speed. arrivals: what comes later."""

    name: str
    about: str
    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    counted: Literal["output", "prompt"] = "output"
    arrivals: Arrivals | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest request that may be drawn."""
        own = self.prompt[1] + self.output[1]
        return own if self.arrivals is None else max(own, self.arrivals.prompt + self.arrivals.output)

    @property
    def most_rows(self) -> int:
        """Requests that may be there at once."""
        return self.requests + (self.arrivals.requests if self.arrivals else 0)

    def scaled(self, factor: float) -> Workload:
        """The same kind of work, with fewer and shorter requests."""

        def part(number: int) -> int:
            return max(1, round(number * factor))

        arrivals = self.arrivals
        if arrivals is not None:
            arrivals = Arrivals(part(arrivals.requests), part(arrivals.prompt), part(arrivals.output), part(arrivals.every))
        prompt, output = ((part(low), part(high)) for low, high in (self.prompt, self.output))
        return replace(self, requests=part(self.requests), prompt=prompt, output=output, arrivals=arrivals)

    def jobs(self, seed: int, vocab_size: int, run: int = 0) -> list[Job]:
        """The requests. Lengths depend on the seed alone, token ids on the run too, so that no run finds the prompts of an earlier one.

        Drawn in the order that is usual for `offline`: every prompt's length and ids, then every output's length.
        """
        draw = random.Random(seed)
        ids = min(IDS, vocab_size)
        prompts = [[draw.randint(0, IDS) % ids for _ in range(draw.randint(*self.prompt))] for _ in range(self.requests)]
        outputs = [draw.randint(*self.output) for _ in range(self.requests)]
        if run:
            prompts = [fresh(seed, run, ids, len(prompt), place) for place, prompt in enumerate(prompts)]
        return [Job(tuple(prompt), output) for prompt, output in zip(prompts, outputs, strict=True)]

    def later(self, seed: int, vocab_size: int, run: int = 0) -> list[Job]:
        """The requests of `arrivals`, in their order."""
        if self.arrivals is None:
            return []
        ids, new = min(IDS, vocab_size), self.arrivals
        return [Job(tuple(fresh(seed, run, ids, new.prompt, self.requests + i)), new.output) for i in range(new.requests)]


def fresh(seed: int, run: int, ids: int, length: int, place: int) -> list[int]:
    """Token ids of one prompt, unlike those of other runs and places."""
    drawn: list[int] = np.random.default_rng([seed, run - WARM_UP, place]).integers(0, ids, length).tolist()
    return drawn


def _batch(rows: int, output: int) -> Workload:
    return Workload(f"bs{rows}", f"{rows} requests of 128 prompt tokens and {output} new ones", rows, (128, 128), (output, output))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("offline", "256 requests of 100-1024 prompt tokens and 100-1024 new ones", 256, (100, 1024), (100, 1024)),
        Workload("wide", "1,024 requests of 32 prompt tokens and 512 new ones", 1024, (32, 32), (512, 512)),
        _batch(1, 1024),
        _batch(8, 512),
        _batch(32, 512),
        _batch(128, 512),
        Workload("prefill", "32 requests of 8,192 prompt tokens and 16 new ones", 32, (8192, 8192), (16, 16), counted="prompt"),
        Workload(
            "mixed",
            "64 requests decode while prompts of 8,192 tokens arrive: time between their tokens",
            64,
            (128, 128),
            (640, 640),
            arrivals=Arrivals(requests=16, prompt=8192, output=16, every=32),
        ),
    )
}
