"""Whether an engine process is well, judged by what it says."""

from __future__ import annotations

import time
from collections.abc import Callable

from modelrunner.messages import EngineStats


class Liveness:
    """Healthy means: while requests are open, tokens flow; while none are, the process says that it is there.

    A step may take long, and so may the way to the first token, as long as some token, of a prompt or of an output, was computed or some
    request ended within the last `limit` seconds. A loop that turns without that is not healthy. Tensors of new weights count like tokens;
    while the engine sleeps, none are awaited. clock: monotonic seconds.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.stats = EngineStats()
        self._clock = clock
        self._heard = self._moved = clock()

    def hear(self, stats: EngineStats) -> None:
        """The process said something."""
        self._heard = self._clock()
        if stats.sleeping or stats.progress != self.stats.progress:
            self._moved = self._heard
        self.stats = stats

    def begin(self) -> None:
        """A request was opened while none was: from now on tokens are awaited."""
        self._moved = self._clock()

    def problem(self, num_open: int) -> str | None:
        """What is wrong, None if nothing is. num_open: requests that are open."""
        if self.stats.weights_problem:
            return self.stats.weights_problem
        silent = self._clock() - (self._moved if num_open else self._heard)
        if silent <= self.limit:
            return None
        what = f"no token was computed for {num_open} open requests" if num_open else "the idle engine process was silent"
        return f"{what} in the last {silent:.0f} seconds (setting process.stall_limit: {self.limit:g} seconds)"
