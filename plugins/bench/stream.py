"""`mixed`: how evenly tokens come while long prompts arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from modelrunner.errors import ModelRunnerError
from modelrunner.plugins.bench.asked import GREEDY, Sampling, params_of
from modelrunner.plugins.bench.drive import require, undisturbed
from modelrunner.plugins.bench.scenarios import Job

if TYPE_CHECKING:
    from modelrunner.engine import Engine
    from modelrunner.request import RequestOutput

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stream:
    """intervals: seconds between tokens of the decoding requests, all of them. first: seconds from a long prompt's submission to its first
    token. seconds: of the whole run; output_tokens, steps: in it."""

    intervals: FloatArray
    first: Sequence[float]
    seconds: float
    output_tokens: int
    steps: int


def percentiles(seconds: Sequence[float] | FloatArray) -> dict[str, float]:
    """Milliseconds: median, 99th percentile (both at a measured value, the lower of two), longest."""
    values = np.asarray(seconds, np.float64) * 1000
    median, high = np.percentile(values, [50, 99], method="lower")
    return {"p50": float(median), "p99": float(high), "max": float(values.max())}


def intervals(times: Sequence[float], known: Int32Array) -> FloatArray:
    """Seconds between a row's tokens. times [S]: when each step's results were there. known [S, rows]: tokens of each row then.

    Tokens that came together have 0 between them.
    """
    clock = np.asarray(times, np.float64)
    parts = []
    for row in known.T:
        new = np.diff(row)
        at = np.flatnonzero(new)
        stamps = np.repeat(clock[at + 1], new[at])
        parts.append(np.diff(stamps))
    return np.concatenate(parts)


def stream(engine: Engine, jobs: Sequence[Job], later: Sequence[Job], every: int, sampling: Sampling = GREEDY) -> Stream:
    """Let all of `jobs` decode, then submit one of `later` after each `every` steps. Intervals are measured until the first of `jobs` ends.

    Raises ModelRunnerError when an output is not as long as asked, or when a decoding request lost its row on the way.
    """
    every_job = [*jobs, *later]
    params = [params_of(job, sampling) for job in every_job]
    ended: dict[int, RequestOutput] = {}
    watched: list[tuple[float, Int32Array]] = []
    stats = engine.scheduler.stats

    def submit(place: int) -> None:
        engine.add_request(str(place), {"prompt_token_ids": list(every_job[place].prompt)}, params[place])

    def step() -> None:
        for output in engine.step():
            ended[int(output.request_id)] = output

    with undisturbed(engine):
        start, before, preempted = perf_counter(), stats.steps, stats.preemptions
        for place in range(len(jobs)):
            submit(place)
        decoding = list(engine.requests.values())
        while any(request.first_token_time is None for request in decoding):
            step()
        rows = np.array([request.row for request in decoding], np.int32)
        if ended or rows.min() < 0:
            raise ModelRunnerError(f"some of the {len(jobs)} requests had ended or lost their row before all of them decoded")
        turn, come = 0, len(jobs)
        while engine.has_unfinished():
            if come < len(every_job) and turn % every == 0:
                submit(come)
                come += 1
            turn += 1
            committed = stats.steps
            step()
            if stats.steps != committed and not ended.keys() & set(range(len(jobs))):
                watched.append((perf_counter(), engine.scheduler.rows.known[rows]))
        end = perf_counter()
    if stats.preemptions != preempted:
        raise ModelRunnerError(f"{stats.preemptions - preempted} requests lost their row: the cache is too small for `mixed`")
    require(every_job, [len(ended[place].outputs[0].token_ids) for place in range(len(every_job))])
    first = [first_token(ended[place]) for place in range(len(jobs), len(every_job))]
    gaps = intervals([time for time, _ in watched], np.stack([counts for _, counts in watched]))
    return Stream(gaps, first, end - start, sum(job.output for job in every_job), stats.steps - before)


def first_token(output: RequestOutput) -> float:
    """Seconds from a request's submission to its first token."""
    at = output.metrics.first_token_time
    assert at is not None, "a request that gave tokens has a first one"
    return at - output.metrics.arrival_time
