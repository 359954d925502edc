"""Hooks into a running engine that tests need: act at a moment of a step, preempt, count, poison freed pages, check that all is clean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from modelrunner.batch import Plan
from modelrunner.request import Request, SamplingParams
from modelrunner.testing.drive import Driver
from modelrunner.testing.reference import assert_same
from modelrunner.testing.subjects import Subject

Moment = Literal["planned", "launched", "collected", "committed"]
# moment -> part of the engine, its method, and the step's plan from (arguments, result)
MOMENTS: dict[Moment, tuple[str, str, Callable[[tuple[Any, ...], Any], Any]]] = {
    "planned": ("scheduler", "plan", lambda arguments, result: result),
    "launched": ("runner", "launch", lambda arguments, result: result.plan),
    "collected": ("runner", "collect", lambda arguments, result: result.plan),
    "committed": ("scheduler", "commit", lambda arguments, result: arguments[0].plan),
}
E4M3_NAN = 0x7F
PROBE_PROMPT = [1, 10, 11, 12]
PROBE_PARAMS = SamplingParams(temperature=0, max_tokens=4)


@dataclass(frozen=True)
class Counters:
    """What an engine did since it started. Counts of tokens, steps and preemptions.

    computed_tokens: query tokens of committed steps. cached_tokens: found in the prefix cache at admission or resume. generated_tokens:
    committed output.
    """

    steps: int
    preemptions: int
    computed_tokens: int
    cached_tokens: int
    generated_tokens: int


@dataclass
class _Action:
    moment: Moment
    run: Callable[[], None]
    when: Callable[[Plan], bool]


class EngineProbe:
    """Wraps the loop's four calls of one engine, so that a test can act right after each.

    pending: actions of `once` that have not run yet.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.engine = driver.engine
        self.scheduler = driver.engine.scheduler
        self.pending: list[_Action] = []
        self._poison = False
        for moment in MOMENTS:
            self._wrap(moment)

    # ---- acting ----------------------------------------------------------------------------------------------------

    def once(self, moment: Moment, action: Callable[[], None], when: Callable[[Plan], bool] = lambda plan: True) -> None:
        """Run `action` the next time that `moment` is reached by a step whose plan satisfies `when`."""
        self.pending.append(_Action(moment, action, when))

    def drain(self) -> None:
        """Collect every step in flight; the outputs go to the driver."""
        self.driver.receive(self.engine.drain())

    def preempt(self, request_id: str) -> None:
        """Drain, then take the request's row and pages away; it waits to be resumed. It must be running and unfinished after the drain."""
        self.drain()
        assert self.scheduler.preempt(request_id), f"{request_id!r} is not running, so it cannot be preempted"

    def poison_freed_pages(self) -> None:
        """From now on, fill freed cache pages with NaN, in stream order, before the next step runs."""
        self.scheduler.pool.record_freed()
        self._poison = True

    # ---- looking ---------------------------------------------------------------------------------------------------

    def counters(self) -> Counters:
        stats = self.scheduler.stats
        return Counters(stats.steps, stats.preemptions, stats.computed_tokens, stats.cached_tokens, stats.generated_tokens)

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return int(self.scheduler.num_running)

    def row_of(self, request_id: str) -> int:
        """Row of a request, -1 while it has none."""
        return self._request(request_id).row

    def names(self, request_id: str, plan: Plan) -> bool:
        """Whether the plan gives the request a query token."""
        row = self.row_of(request_id)
        return row >= 0 and row in plan.rows

    def committed(self, request_id: str) -> int:
        """Tokens of a running request that collected steps put into the cache."""
        row = self.row_of(request_id)
        return int(self.scheduler.rows.computed[row]) if row >= 0 else 0

    def planned(self, request_id: str) -> int:
        """The same, with everything in flight."""
        row = self.row_of(request_id)
        return int(self.scheduler.rows.computed_upper[row]) if row >= 0 else 0

    def known(self, request_id: str) -> int:
        """Prompt and output tokens of an unfinished request that the host knows."""
        request = self._request(request_id)
        if request.row >= 0:
            return int(self.scheduler.rows.known[request.row])
        return len(request.prompt_token_ids) + len(request.output_token_ids)

    def _request(self, request_id: str) -> Request:
        return self.engine.requests[request_id]

    # ---- checking --------------------------------------------------------------------------------------------------

    def assert_alive(self, subject: Subject) -> None:
        """A small request still gives its reference result."""
        self.driver.add("probe", PROBE_PROMPT, PROBE_PARAMS)
        self.driver.finish()
        assert_same(subject, PROBE_PROMPT, PROBE_PARAMS, self.driver.result("probe"))

    def assert_clean(self) -> None:
        """Nothing is left of finished requests: rows, pages, seats, entries by id. Needs an engine without requests."""
        assert not self.engine.has_unfinished()
        self.scheduler.check()
        pool = self.scheduler.pool
        assert pool.available == pool.capacity, f"{pool.capacity - pool.available} pages are still owned"
        assert self.num_running == self.scheduler.num_waiting == 0
        assert not self.scheduler.rows.active.any(), "a row is still held"
        assert not self.engine.requests, f"requests left in the engine: {sorted(self.engine.requests)}"
        left = {name: value for name, value in vars(self.engine.outputs).items() if isinstance(value, dict | list | set) and value}
        assert not left, f"entries left in the output processor: {left}"

    # ---- wrapping --------------------------------------------------------------------------------------------------

    def _wrap(self, moment: Moment) -> None:
        part_name, method, plan_of = MOMENTS[moment]
        part = getattr(self.engine, part_name)
        original = getattr(part, method)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            if moment == "launched" and self._poison:
                self._poison_pages()
            result = original(*arguments, **options)
            if isinstance(plan := plan_of(arguments, result), Plan):
                self._act(moment, plan)
            return result

        setattr(part, method, wrapped)

    def _act(self, moment: Moment, plan: Plan) -> None:
        due = [action for action in self.pending if action.moment == moment and action.when(plan)]
        for action in due:
            self.pending.remove(action)
            action.run()

    def _poison_pages(self) -> None:
        """Every launched step that may read the pages comes before this in the stream, and every new owner's step after it."""
        if not (freed := self.scheduler.pool.take_freed()):
            return
        caches = self.engine.runner.parts.caches
        pages = torch.tensor(sorted(set(freed)), device=self.engine.assembly.device.torch_device)

        def fill() -> None:
            for cache in caches.values():
                if cache.dtype == torch.float8_e4m3fn:  # torch fills none of these by index
                    cache.view(torch.uint8)[pages] = E4M3_NAN
                else:
                    cache[pages] = torch.nan

        self.engine.assembly.device.launch(fill)


def run_together(
    driver: Driver, requests: Sequence[tuple[list[int], SamplingParams]], preempt_after: int | None = None
) -> list[list[int]]:  # fmt: skip
    """Output tokens of requests that run together, after which the engine must be clean. preempt_after: steps, after which each request
    that runs is preempted once; None for no preemption."""
    probe = EngineProbe(driver)
    for i, (prompt, params) in enumerate(requests):
        driver.add(str(i), prompt, params)
    if preempt_after is not None:
        for _ in range(preempt_after):
            driver.step()
        probe.drain()
        for name in [name for name in driver.engine.requests if probe.row_of(name) >= 0]:
            probe.preempt(name)
    driver.finish()
    probe.assert_clean()
    return [list(driver.result(str(i)).token_ids) for i in range(len(requests))]
