"""Observers: what happens in an engine, told afterwards and in one piece per step.

A plugin answers the hook `observer` with an `Observer`. The engine collects times and counts as it goes and tells them once the next step
is launched, so that an observer's own work overlaps the device's. A method that no observer overrides is not called, its event not built.

    class Tokens(Observer):
        def on_step(self, report: StepReport) -> None:
            print(report.num_generated, "tokens in", report.committed - report.planning, "seconds")

Nothing here imports torch.
"""

from __future__ import annotations

from typing import NamedTuple


class StepReport(NamedTuple):
    """One step, from the start of its plan to the end of its commit. Times are `time.monotonic()` seconds.

    planning, planned: the scheduler decided between them. launched: the step was enqueued (on a CPU device: done). waiting: the engine
    began to wait for its results. arrived: they were there. committed: requests were updated and outputs made. With several steps in
    flight, others are planned and launched between `launched` and `waiting`.

    num_rows, num_tokens: of the step. num_decode: rows that compute one token each, and drafts. num_generated: tokens it added to outputs.
    num_finished: requests it ended. At the time of the launch: num_running: requests with a row, num_waiting: without one; num_in_flight:
    launched steps, this one included; pages_free, pages_total: of the cache, in pages (free ones may hold cached prefixes).
    num_preemptions: requests that gave way for this step. num_held: rows with structured output that were left out of it, since the mask
    of their next token was not there. num_drafted, num_accepted: drafts that it checked and kept.
    """

    step: int
    planning: float
    planned: float
    launched: float
    waiting: float
    arrived: float
    committed: float
    num_rows: int
    num_tokens: int
    num_decode: int
    num_generated: int
    num_finished: int
    num_running: int
    num_waiting: int
    num_in_flight: int
    pages_free: int
    pages_total: int
    num_preemptions: int
    num_held: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class RequestStart(NamedTuple):
    """A request was accepted. arrival: `time.monotonic()` seconds. num_prompt_tokens: of its prompt. priority: lower runs earlier."""

    request_id: str
    arrival: float
    num_prompt_tokens: int
    priority: int


class RequestFinish(NamedTuple):
    """A request ended. reason: `stop`, `length`, `abort`, `timeout` or `error`. Times are `time.monotonic()` seconds.

    first_token: when its first output token was committed, None if it has none. num_cached_tokens: of the prompt, found in the cache.
    grammar_way: of a request with structured output whose grammar was compiled: "device", or "host: " and why.
    num_drafted, num_accepted: drafts that steps checked and kept.
    """

    request_id: str
    reason: str
    arrival: float
    first_token: float | None
    finished: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    grammar_way: str | None = None
    num_drafted: int = 0
    num_accepted: int = 0


class Observer:
    """Told what happens, in the thread that drives the engine. Override what is wanted; what is not overridden costs nothing.

    Calls come after the launch of the next step, or when there is none. An observer that raises is reported by a PluginWarning that
    names it, and is told nothing more; the engine and the other observers go on.
    """

    def on_step(self, report: StepReport) -> None:
        """A step was committed. Reports come in step order."""

    def on_request_start(self, event: RequestStart) -> None:
        """A request was accepted. It waits for its first step."""

    def on_request_finish(self, event: RequestFinish) -> None:
        """A request ended. Its last step's report came before."""

    def close(self) -> None:
        """The engine was closed; nothing comes after this."""
