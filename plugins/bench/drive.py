"""Driving an engine through a workload: quietly, with nothing made in the loop but what the engine makes."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from modelrunner.errors import ModelRunnerError
from modelrunner.plugins.bench.asked import GREEDY, Sampling, params_of
from modelrunner.plugins.bench.scenarios import Job

if TYPE_CHECKING:
    from modelrunner.engine import Engine


@dataclass(frozen=True)
class Run:
    """One pass over a workload. seconds: from the first request's submission to the last output; adding: of it, the submissions.

    steps: committed ones. cached_tokens: of prompts, found in the prefix cache; there should be none. drafted_at, accepted_at: as in
    `Stats`, empty without a drafter.
    """

    seconds: float
    adding: float
    output_tokens: int
    steps: int
    cached_tokens: int
    preemptions: int
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()

    @property
    def drafts(self) -> dict[str, Any]:
        """What speculative decoding did, for a record; nothing without a drafter."""
        if not self.drafted_at:
            return {}
        places = [kept / checked if checked else 0.0 for kept, checked in zip(self.accepted_at, self.drafted_at, strict=True)]
        return {"num_drafted": sum(self.drafted_at), "num_accepted": sum(self.accepted_at), "acceptance_at": places}


@contextmanager
def undisturbed(engine: Engine) -> Iterator[None]:
    """No garbage of before is collected inside, and no prefix of before is found."""
    engine.scheduler.reset_prefix_cache()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def drive(engine: Engine, jobs: Sequence[Job], sampling: Sampling = GREEDY) -> Run:
    """Run all jobs to their end. Raises ModelRunnerError when an output is not as long as asked."""
    prompts = [{"prompt_token_ids": list(job.prompt)} for job in jobs]
    params = [params_of(job, sampling) for job in jobs]
    names = [str(place) for place in range(len(jobs))]
    lengths = [0] * len(jobs)
    stats, step = engine.scheduler.stats, engine.step
    before = stats.steps, stats.cached_tokens, stats.preemptions, *stats.drafted_at, *stats.accepted_at
    with undisturbed(engine):
        start = perf_counter()
        for name, prompt, param in zip(names, prompts, params, strict=True):
            engine.add_request(name, prompt, param)
        added = perf_counter()
        while engine.has_unfinished():
            for output in step():
                lengths[int(output.request_id)] = len(output.outputs[0].token_ids)
        end = perf_counter()
    require(jobs, lengths)
    after = stats.steps, stats.cached_tokens, stats.preemptions, *stats.drafted_at, *stats.accepted_at
    steps, cached, preemptions, *drafts = (now - then for now, then in zip(after, before, strict=True))
    places = len(stats.drafted_at)
    return Run(end - start, added - start, sum(lengths), steps, cached, preemptions, tuple(drafts[:places]), tuple(drafts[places:]))


def require(jobs: Sequence[Job], lengths: Sequence[int]) -> None:
    """A speed of anything but the work asked for would mean nothing."""
    for place, (job, length) in enumerate(zip(jobs, lengths, strict=True)):
        if length != job.output:
            raise ModelRunnerError(f"request {place} gave {length} tokens and asked for {job.output}")


def abandon(engine: Engine) -> None:
    """End whatever is left, and take its last outputs."""
    for name in list(engine.requests):
        engine.abort(name)
    while engine.has_unfinished():
        engine.step()
