"""Captured steps: one graph for each number of decode rows and kind of tail, replayed with new inputs in the same places.

A step of decode rows only is one graph from the gather to the record. Its closure sees the runner's buffers at full width and the bounds of
the longest request, so nothing in it depends on a plan; the first step of a shape runs the closure as it is (which also builds its
kernels), the second records it. What the start-up captured is ready from the first step on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from modelrunner.attention import AttentionBackend
from modelrunner.batch import EDITED, Feature, Plan
from modelrunner.device import Device
from modelrunner.model_state import ModelState, Needs, No

KINDS = (Feature.GREEDY, Feature.PLAIN)  # tails captured at start-up; others on their second use
CAPTURED = int(Feature.PLAIN | Feature.FILTERED | EDITED)  # features of tails that can be captured: not those of taps


class Key(NamedTuple):
    """What tells one graph from another. num_rows: padded decode rows."""

    num_rows: int
    features: Feature


@dataclass(frozen=True)
class GraphReport:
    """What start-up captured. seconds: wall time. num_bytes: device memory taken. reason: why nothing was captured."""

    count: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"none: {self.reason}"
        return f"{self.count} captured in {self.seconds:.1f} s, {self.num_bytes / 2**20:.0f} MiB"


def decode_buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows to capture: where a kernel's tile ends, further apart as padding costs less. The last one is max_rows."""
    sizes = [1, 2, 4]
    for end, step in ((64, 8), (128, 16), (256, 32), (512, 64), (max(max_rows, 512), 128)):
        sizes += range(sizes[-1] // 8 * 8 + (8 if sizes[-1] < 8 else step), end + 1, step)
    return (*(size for size in sizes if size < max_rows), max_rows)


def capture_problem(eager: bool, device: Device, state: ModelState, needs: Needs, backends: Mapping[str, AttentionBackend]) -> str:
    """Why steps cannot be captured; empty if they can."""
    if eager:
        return "graphs.eager is set"
    if not device.captures:
        return f"device {device.name!r} captures no graphs"
    if needs.capture == "none":
        return f"{type(state).__name__}: {needs.capture_reason}"
    if isinstance(answer := state.supports("graphs"), No):
        return f"{type(state).__name__}: {answer.reason}"
    unable = [f"{name} ({type(b).__name__})" for name, b in backends.items() if not b.capturable or b.needs_host_lengths]
    return f"the attention backends of {', '.join(unable)} cannot be captured" if unable else ""


class StepGraphs:
    """Keeps a closure, and once it is captured a replay, for each key. `run` is called where the step's work runs: in stream order."""

    def __init__(self, device: Device, buckets: Sequence[int], make: Callable[[Key], Callable[[], None]], reason: str = "") -> None:
        """buckets: numbers of rows that may be captured. make: builds the closure of a key. reason: why nothing is to be captured."""
        self.device = device
        self.reason = reason
        self._buckets = frozenset(() if reason else buckets)
        self._make = make
        self._closures: dict[Key, Callable[[], None]] = {}
        self._replays: dict[Key, Callable[[], None]] = {}

    def key(self, plan: Plan, num_rows: int) -> Key | None:
        """The graph that runs `plan`, padded to `num_rows`; None for a step that is not captured."""
        if plan.num_decode != plan.num_rows or plan.num_draft or num_rows not in self._buckets or int(plan.features) & ~CAPTURED:
            return None
        features = plan.features | EDITED if plan.features & EDITED else plan.features  # one graph edits all that a row may ask for
        return Key(num_rows, features)

    def run(self, key: Key) -> None:
        """D. Run the step of `key` on the inputs that are staged."""
        if (replay := self._replays.get(key)) is not None:
            replay()
        elif key in self._closures:
            self.capture(key)
            self._replays[key]()
        else:
            self._closures[key] = closure = self._make(key)
            closure()

    def capture(self, key: Key) -> None:
        """Record the closure of `key`, which has run before."""
        self._replays[key] = self.device.capture(self._closures[key])

    def forget(self) -> None:
        """Drop all graphs, e.g. because memory that they name has moved. They are captured again as they are used."""
        self._replays.clear()
        self.device.forget_graphs()

    def capture_all(self, stage: Callable[[Key], None], progress: Callable[[Sequence[Key]], Sequence[Key]]) -> GraphReport:
        """Capture every bucket with each of `KINDS`, from large to small, so that they share one pool of memory.

        stage: puts a harmless step of a key's shape into the input buffers. progress: wraps the sequence in a progress bar.
        """
        if self.reason:
            return GraphReport(reason=self.reason)
        began, free = time.monotonic(), self.device.memory()[0]
        keys = [Key(rows, features) for rows in sorted(self._buckets, reverse=True) for features in KINDS]
        for key in progress(keys):
            stage(key)
            self.device.launch(lambda key=key: self.run(key))  # type: ignore[misc]
            self.device.launch(lambda key=key: self.capture(key))  # type: ignore[misc]
        self.device.synchronize()
        return GraphReport(len(keys), time.monotonic() - began, max(free - self.device.memory()[0], 0))
