"""Collects what observers are told, and tells it to them at a moment when the device is busy anyway."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from modelrunner.errors import PluginWarning
from modelrunner.observers import Observer, RequestFinish, RequestStart, StepReport

if TYPE_CHECKING:
    from modelrunner.batch import Plan
    from modelrunner.request import Request
    from modelrunner.scheduler import Scheduler
    from modelrunner.step_books import Committed

Listener = tuple[str, Observer, Callable[[Any], None]]  # plugin, observer, its method
Launched = tuple[tuple[float, float, float], tuple[int, int, int, int], int, int]  # times, counts, preemptions, held rows


class Watch:
    """The engine's side of its observers. Everything returns at once when no observer overrides the method that it is for."""

    def __init__(self, observers: Sequence[tuple[str, Observer]], scheduler: Scheduler) -> None:
        """observers: (plugin, observer)."""
        self._observers = list(observers)
        self._scheduler = scheduler
        self._on_step, self._on_start, self._on_finish = (
            self._listeners(method) for method in ("on_step", "on_request_start", "on_request_finish")
        )
        self._launches: deque[Launched] = deque()
        self._reports: list[StepReport] = []
        self._starts: list[RequestStart] = []
        self._finishes: list[tuple[Request, float]] = []
        self._preemptions = self._generated = self._drafted = self._accepted = 0  # as told so far

    def _listeners(self, method: str) -> list[Listener]:
        default = getattr(Observer, method)
        return [(plugin, o, getattr(o, method)) for plugin, o in self._observers if getattr(type(o), method) is not default]

    # ---- what happens ----------------------------------------------------------------------------------------------

    def request_started(self, request: Request) -> None:
        if self._on_start:
            self._starts.append(RequestStart(request.id, request.arrival, len(request.prompt_token_ids), request.priority))

    def request_finished(self, request: Request) -> None:
        if self._on_finish:
            self._finishes.append((request, time.monotonic()))

    def launched(self, planning: float, planned: float) -> None:
        """A step was launched just now. planning, planned: when its plan was begun and done."""
        if not self._on_step:
            return
        scheduler = self._scheduler
        preemptions = scheduler.stats.preemptions
        now = time.monotonic()
        counts = scheduler.num_running, scheduler.num_waiting, scheduler.num_in_flight
        changed = preemptions - self._preemptions
        self._launches.append(((planning, planned, now), (*counts, scheduler.pool.available), changed, scheduler.num_held))
        self._preemptions = preemptions

    def committed(self, plan: Plan, waiting: float, arrived: float, committed: Committed) -> None:
        """The oldest launched step was committed just now."""
        if not self._launches:
            return
        times, counts, preemptions, held = self._launches.popleft()
        stats = self._scheduler.stats
        generated, drafted, accepted = stats.generated_tokens, stats.num_drafted, stats.num_accepted
        drafts = drafted - self._drafted, accepted - self._accepted
        step = plan.num_rows, plan.num_tokens, plan.num_decode, generated - self._generated, len(committed.finished)
        self._generated, self._drafted, self._accepted = generated, drafted, accepted
        now = time.monotonic()
        # By place, in the order of the report's fields: a step should not wait for names.
        self._reports.append(
            StepReport(plan.step, *times, waiting, arrived, now, *step, *counts, self._scheduler.pool.capacity, preemptions, held, *drafts)
        )

    # ---- telling ---------------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Tell the observers all that has gathered: requests that started, steps, requests that ended."""
        if self._starts:
            starts, self._starts = self._starts, []
            self._tell(self._on_start, starts)
        if self._reports:
            reports, self._reports = self._reports, []
            self._tell(self._on_step, reports)
        if self._finishes:
            finishes, self._finishes = self._finishes, []
            self._tell(self._on_finish, [finish_event(request, at) for request, at in finishes])

    def _tell(self, listeners: list[Listener], events: Sequence[Any]) -> None:
        for listener in tuple(listeners):
            plugin, observer, method = listener
            try:
                for event in events:
                    method(event)
            except (Exception, SystemExit) as error:
                self._drop(plugin, observer, method.__name__, error)

    def _drop(self, plugin: str, observer: Observer, method: str, error: BaseException) -> None:
        for listeners in (self._on_step, self._on_start, self._on_finish):
            listeners[:] = [listener for listener in listeners if listener[1] is not observer]
        self._observers = [pair for pair in self._observers if pair[1] is not observer]
        warnings.warn(
            f"observer {type(observer).__name__} of plugin {plugin!r} raised in {method}: {type(error).__name__}: {error}. "
            "It is told nothing more",
            PluginWarning,
            stacklevel=2,
        )

    def close(self) -> None:
        """Tell what is left, then that nothing follows. A second call does nothing."""
        self.deliver()
        observers, self._observers = self._observers, []
        for plugin, observer in observers:
            try:
                observer.close()
            except (Exception, SystemExit) as error:
                self._drop(plugin, observer, "close", error)


def finish_event(request: Request, at: float) -> RequestFinish:
    return RequestFinish(
        request_id=request.id,
        reason=str(request.finish_reason),
        arrival=request.arrival,
        first_token=request.first_token_time,
        finished=at,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=len(request.output_token_ids),
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        grammar_way=request.grammar_way,
        num_drafted=request.num_drafted,
        num_accepted=request.num_accepted,
    )
