"""The observer behind `--trace`, and the two forms of its file."""

from __future__ import annotations

import atexit
import html
import json
from collections import deque
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from modelrunner.observers import Observer, RequestFinish, StepReport

HOST, FIRST_LANE = 1, 2  # rows of the timeline: the host's own work, then one for each step in flight
PHASES = (
    ("plan", "planning", "planned"),
    ("launch", "planned", "launched"),
    ("wait", "waiting", "arrived"),
    ("commit", "arrived", "committed"),
)
COUNTS = ("num_rows", "num_tokens", "num_decode", "num_generated", "num_finished", "num_running", "num_waiting", "num_preemptions")
Event = dict[str, Any]


class TraceObserver(Observer):
    """Keeps the newest `max_steps` steps and as many requests, and writes them to `path` at the end."""

    def __init__(self, path: Path, max_steps: int) -> None:
        self.path = path
        self.steps: deque[StepReport] = deque(maxlen=max_steps)
        self.requests: deque[RequestFinish] = deque(maxlen=max_steps)
        atexit.register(self.close)  # for engines that are never closed

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)

    def on_request_finish(self, event: RequestFinish) -> None:
        self.requests.append(event)

    def close(self) -> None:
        """Write the file."""
        atexit.unregister(self.close)
        events = trace_events(self.steps, self.requests)
        text = page(events, self.path.stem) if self.path.suffix == ".html" else json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
        self.path.write_text(text, encoding="utf-8")


def trace_events(steps: Sequence[StepReport], requests: Iterable[RequestFinish]) -> list[Event]:
    """Events of Chrome's trace format. `ts` and `dur` are microseconds since the first step was planned.

    Row 1 is the host: plan, launch, wait, commit. The rows below are steps in flight, from their launch to the arrival of their results.
    Requests are asynchronous events, from arrival to end. Steps are counters too: rows, tokens, waiting requests, used pages.
    """
    if not steps:
        return []
    start = min(report.planning for report in steps)
    lanes = max(report.num_in_flight for report in steps)
    names = {HOST: "host", **{FIRST_LANE + lane: f"in flight {lane + 1}" for lane in range(lanes)}}
    events = [{"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": name}} for row, name in names.items()]

    def span(name: str, row: int, begin: float, end: float, args: dict[str, Any]) -> Event:
        return {"ph": "X", "name": name, "pid": 1, "tid": row, "ts": micros(begin - start), "dur": micros(end - begin), "args": args}

    for report in steps:
        step = {"step": report.step}
        events += [span(name, HOST, getattr(report, begin), getattr(report, end), step) for name, begin, end in PHASES]
        counts = {**step, **{name.removeprefix("num_"): getattr(report, name) for name in COUNTS}}
        events.append(span(f"step {report.step}", FIRST_LANE + report.step % lanes, report.launched, report.arrived, counts))
        at = micros(report.launched - start)
        used = report.pages_total - report.pages_free
        for name, count in (("rows", report.num_rows), ("tokens", report.num_tokens), ("waiting", report.num_waiting), ("pages", used)):
            events.append({"ph": "C", "name": name, "pid": 1, "ts": at, "args": {name: count}})
    return events + [event for number, request in enumerate(requests) for event in request_events(number, request, start)]


def request_events(number: int, request: RequestFinish, start: float) -> list[Event]:
    """Begin, first token and end of a request. number: tells it from others of the same id."""
    args = {"prompt tokens": request.num_prompt_tokens, "output tokens": request.num_output_tokens, "reason": request.reason}
    times = [("b", request.arrival), ("n", request.first_token), ("e", request.finished)]
    common = {"cat": "request", "name": request.request_id, "id": number, "pid": 1}
    return [{"ph": phase, **common, "ts": micros(at - start), "args": args} for phase, at in times if at is not None]


def micros(seconds: float) -> float:
    """To a tenth of a microsecond."""
    return round(seconds * 1e6, 1)


def page(events: Sequence[Event], title: str) -> str:
    """A page that draws `events` and needs nothing else."""
    data = json.dumps(list(events)).replace("<", "\\u003c")  # a request may be named like a tag
    template = files("modelrunner.plugins").joinpath("trace.html").read_text(encoding="utf-8")
    return template.replace("@TITLE@", html.escape(title)).replace("@EVENTS@", data)
