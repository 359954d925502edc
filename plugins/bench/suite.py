"""Runs workloads on one engine, one after the other, and says what came out as JSON-able records."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from modelrunner.plugins.bench import drive, floor, hardware, profiler, stream
from modelrunner.plugins.bench.asked import Sampling, as_record
from modelrunner.plugins.bench.workloads import WARM_UP, Workload

if TYPE_CHECKING:
    from modelrunner.engine import Engine
    from modelrunner.plugins.bench.scenarios import Job

Record = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """How to measure. limit: seconds after which a workload is not repeated. profiled: workload -> steps of it to profile."""

    repeat: int = 3
    statistic: str = "median"
    seed: int = 0
    limit: float = 120.0
    profiled: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Bench:
    """One engine, the machine under it, and what was measured of both.

    setting: goes into every record. products: rows -> seconds of all products of a decode step by torch.
    """

    engine: Engine
    machine: floor.Machine
    options: Options
    setting: Mapping[str, Any]
    products: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cost = floor.cost_of(self.engine)
        self.vocab_size = self.engine.assembly.needs.vocab_size

    def measure(self, workload: Workload, sampling: Sampling) -> Record:
        """Warm up with other tokens, then run it as often as asked. An engine that fails on the way is of no more use."""
        before = os.getloadavg()[0]
        measured = self._mixed(workload, sampling) if workload.arrivals else self._throughput(workload, sampling)
        head = {"scenario": workload.name, "engine": "modelrunner", **as_record(sampling)}
        rest: Record = {"peak_device_memory_bytes": hardware.peak_memory(self.engine.assembly.device.torch_device)}
        record = {
            **head,
            **measured,
            **rest,
            **describe(self.machine, self.cost),
            "load_average": [before, os.getloadavg()[0]],
            **self.setting,
        }
        if steps := self.options.profiled.get(workload.name):
            record["profile"] = self._profile(workload, sampling, steps)
        return record

    def _jobs(self, workload: Workload, run: int) -> list[Job]:
        return workload.jobs(self.options.seed, self.vocab_size, run)

    def _throughput(self, workload: Workload, sampling: Sampling) -> Record:
        drive.drive(self.engine, self._jobs(workload, WARM_UP), sampling)
        runs: list[drive.Run] = []
        while not runs or (len(runs) < self.options.repeat and sum(run.seconds for run in runs) < self.options.limit):
            runs.append(drive.drive(self.engine, self._jobs(workload, len(runs)), sampling))
        jobs = self._jobs(workload, 0)
        seconds = [run.seconds for run in runs]
        taken = min(seconds) if self.options.statistic == "best" else statistics.median(seconds)
        tokens = {"prompt": sum(len(job.prompt) for job in jobs), "output": sum(job.output for job in jobs)}
        return {
            "tokens_per_second": tokens[workload.counted] / taken,
            "counted": workload.counted,
            "statistic": self.options.statistic,
            "seconds": seconds,
            "requests": len(jobs),
            "prompt_tokens": tokens["prompt"],
            "output_tokens": tokens["output"],
            "steps": runs[-1].steps,
            "ms_per_step": 1000 * taken / runs[-1].steps,
            "adding_seconds": runs[-1].adding,
            "cached_tokens": sum(run.cached_tokens for run in runs),
            "preemptions": sum(run.preemptions for run in runs),
            **runs[-1].drafts,
            **self._floors(jobs, tokens[workload.counted], taken),
        }

    def _floors(self, jobs: Sequence[Job], counted: int, taken: float) -> Record:
        """What the machine would allow, and the share of it that was reached; nothing for a model whose cost is not known."""
        if self.cost is None:
            return {}
        scheduler = self.engine.settings.scheduler
        steps = list(floor.schedule(jobs, scheduler.max_rows, scheduler.max_batched_tokens))
        least = floor.floor_seconds(steps, self.cost, self.machine)
        found: Record = {"floor": {"tokens_per_second": counted / least, "share": least / taken, "steps": len(steps)}}
        rows = min(len(jobs), scheduler.max_rows)
        if (products := self._products(rows)) is not None:
            least = floor.floor_seconds(steps, self.cost, self.machine, floor.interpolated(self.products))
            found["library_floor"] = {
                "tokens_per_second": counted / least,
                "share": least / taken,
                "rows": rows,
                "products_ms": 1000 * products,
            }
        return found

    def _products(self, rows: int) -> float | None:
        """Time of the products at `rows`, measured once; also at fewer rows, for workloads that shrink."""
        for size in sorted({1, 8, 32, 128, 256, 512, 1024, rows}):
            if size <= rows and size not in self.products:
                seconds = hardware.product_seconds(self.engine, size)
                if seconds is None:
                    return None
                self.products[size] = seconds
        return self.products[rows]

    def _mixed(self, workload: Workload, sampling: Sampling) -> Record:
        assert workload.arrivals is not None
        later = [workload.later(self.options.seed, self.vocab_size, run) for run in range(-1, self.options.repeat)]
        runs: list[stream.Stream] = []
        for run in range(WARM_UP, self.options.repeat):
            if run > 0 and sum(done.seconds for done in runs) > self.options.limit:
                break
            done = stream.stream(self.engine, self._jobs(workload, run), later[run + 1], workload.arrivals.every, sampling)
            runs += [done] if run >= 0 else []
        tails = [stream.percentiles(run.intervals) for run in runs]
        taken = statistics.median(run.seconds for run in runs)
        return {
            "tokens_per_second": runs[0].output_tokens / taken,
            "counted": "output",
            "statistic": "median",
            "seconds": [run.seconds for run in runs],
            "requests": workload.most_rows,
            "prompt_tokens": sum(len(job.prompt) for job in self._jobs(workload, 0)) + sum(len(job.prompt) for job in later[1]),
            "output_tokens": runs[0].output_tokens,
            "steps": runs[-1].steps,
            "ms_per_step": 1000 * taken / runs[-1].steps,
            "inter_token_ms": {name: statistics.median(tail[name] for tail in tails) for name in tails[0]},
            "first_token_ms": stream.percentiles([first for run in runs for first in run.first]),
        }

    def _profile(self, workload: Workload, sampling: Sampling, steps: int) -> Record:
        """Decode steps, or, of a workload of prompts, its first few."""
        steady = workload.counted == "output"
        steps = steps if steady else min(steps, 4)
        jobs = self._jobs(workload, self.options.repeat)
        return profiler.as_record(profiler.profile_steps(self.engine, jobs, sampling, steps, steady=steady))


def describe(machine: floor.Machine, cost: floor.ModelCost | None) -> Record:
    """What floors stand on."""
    return {"copy_bandwidth": machine.bandwidth, "peak_flops": machine.flops, "model_cost": None if cost is None else asdict(cost)}
