"""The work of a benchmark: requests of fixed or seeded lengths, the same for every engine. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STATIC_BATCH = 8  # requests that an engine without continuous batching runs at a time


@dataclass(frozen=True)
class Job:
    """One request: prompt ids, and the number of tokens to generate, whatever they are."""

    prompt: tuple[int, ...]
    output: int


@dataclass(frozen=True)
class Scenario:
    """requests: how many. prompt, output: tokens, inclusive bounds between which each request's length is drawn. batch: size of the
    static batches of an engine that has no other, in order of arrival."""

    name: str
    about: str
    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    batch: int

    @property
    def longest(self) -> int:
        """Tokens of the longest request that may be drawn."""
        return self.prompt[1] + self.output[1]

    def jobs(self, vocab_size: int, seed: int) -> list[Job]:
        """The requests. Lengths depend on the seed alone, so that models of any vocabulary get the same amount of work."""
        lengths = np.random.default_rng(seed)
        ids = np.random.default_rng([seed, vocab_size])
        drawn = [tuple(int(lengths.integers(low, high + 1)) for low, high in (self.prompt, self.output)) for _ in range(self.requests)]
        return [Job(tuple(ids.integers(0, vocab_size, prompt).tolist()), output) for prompt, output in drawn]


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("cpu1", "one request of 38 prompt tokens and 64 new ones", 1, (38, 38), (64, 64), 1),
        Scenario("cpu32", "32 requests of 16-256 prompt tokens and 16-128 new ones", 32, (16, 256), (16, 128), STATIC_BATCH),
    )
}


def static_batches(jobs: Sequence[Job], size: int) -> list[list[Job]]:
    """The jobs in order of arrival, `size` at a time."""
    return [list(jobs[start : start + size]) for start in range(0, len(jobs), size)]
