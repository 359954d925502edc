"""Running a scenario: every engine in turn, as often as asked, with time and memory."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelrunner.plugins.bench.engines import BenchEngine
    from modelrunner.plugins.bench.memory import MemoryMeter
    from modelrunner.plugins.bench.scenarios import Job, Scenario


@dataclass
class Timing:
    """One engine in one scenario. seconds: of each run. output_tokens: asked for, in one run."""

    engine: str
    output_tokens: int
    seconds: list[float] = field(default_factory=list)
    peak_memory: int | None = None

    def taken(self, statistic: str) -> float:
        """Seconds by `statistic`: `best` or `median`."""
        return min(self.seconds) if statistic == "best" else statistics.median(self.seconds)

    def tokens_per_second(self, statistic: str) -> float:
        return self.output_tokens / self.taken(statistic)


@dataclass
class Result:
    """A scenario with all its engines, ours first. equal_tokens: per other engine, output tokens that equal ours up to each request's
    first difference. load: the machine's load average of the last minute, before and after. setting: what it ran with. forms: of engines
    that are all ours, what each ran with; the first is what the others are measured against."""

    scenario: Scenario
    statistic: str
    timings: list[Timing]
    prompt_tokens: int
    equal_tokens: Mapping[str, int]
    load: tuple[float, float]
    setting: Mapping[str, Any]
    forms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def ratio(self, timing: Timing) -> float:
        """Our throughput over that of `timing`."""
        return self.timings[0].tokens_per_second(self.statistic) / timing.tokens_per_second(self.statistic)

    def comparison(self, timing: Timing) -> tuple[str, float]:
        """Who is compared with whom, and the ratio of their throughputs: ours with another's, or a form of ours with the first."""
        first = self.timings[0].engine
        if self.forms:
            return f"{timing.engine} / {first}", 1 / self.ratio(timing)
        return f"{first} / {timing.engine}", self.ratio(timing)


def measure(
    scenario: Scenario,
    jobs: Sequence[Job],
    engines: Sequence[BenchEngine],
    meter: MemoryMeter,
    *,
    repeat: int,
    statistic: str,
    setting: Mapping[str, Any],
) -> Result:
    """Run the jobs `repeat` times with each engine. Engines take turns, so that a machine whose load changes slows all of them."""
    from modelrunner.plugins.bench.engines import warm_up

    before = os.getloadavg()[0]
    asked = sum(job.output for job in jobs)
    timings = [Timing(engine.name, asked) for engine in engines]
    outputs: list[list[list[int]]] = []
    for engine in engines:
        with meter.at_work(engine.name):
            engine.prepare()
            engine.run(warm_up(jobs), scenario.batch)
    for _ in range(repeat):
        outputs.clear()
        for engine, timing in zip(engines, timings, strict=True):
            with meter.at_work(engine.name):
                engine.prepare()
                start = time.perf_counter()
                outputs.append(engine.run(jobs, scenario.batch))
                timing.seconds.append(time.perf_counter() - start)
    for timing in timings:
        timing.peak_memory = meter.peak.get(timing.engine)
    equal = {timing.engine: equal_tokens(outputs[0], other) for timing, other in zip(timings[1:], outputs[1:], strict=True)}
    prompt_tokens = sum(len(job.prompt) for job in jobs)
    return Result(scenario, statistic, timings, prompt_tokens, equal, (before, os.getloadavg()[0]), setting)


def equal_tokens(ours: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int:
    """Tokens that agree before each request's first difference."""
    total = 0
    for one, other in zip(ours, others, strict=True):
        total += next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
    return total
