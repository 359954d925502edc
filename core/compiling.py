"""Compiles grammars in threads of their own, so that a costly one holds up nobody but the requests that ask for it.

What becomes an automaton (see `automaton`) is done then; only what does not, or is wanted for matchers, is compiled by the backend.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from modelrunner.automaton import Automaton
from modelrunner.errors import ModelRunnerError
from modelrunner.grammar import Grammar, GrammarBackend, Vocabulary
from modelrunner.structured_outputs import StructuredOutputsParams

MOST_LOST = 4  # threads, for each that the settings allow, which work on something that nobody waits for


@dataclass(eq=False)
class Job:
    """One grammar to compile. `automaton`, `grammar` or `error` is there once `done`. matchers: no automaton is wanted. reason: why there
    is none, or why none is wanted. vocabulary: the backend's, None if there is no backend. submitted: monotonic seconds."""

    params: StructuredOutputsParams
    matchers: bool
    submitted: float
    automaton: Automaton | None = None
    reason: str = ""
    grammar: Grammar | None = None
    error: str = ""
    vocabulary: Vocabulary | None = None
    done: bool = False
    running: bool = False
    given_up: bool = False


class Compiler:
    """Threads, and the newest grammars. `submit`, `give_up` and `wait` are for the loop's thread alone.

    backend: makes the backend, once, in one of the threads; what it raises fails every job. threads: that compile at once. kept: compiled
    grammars that are remembered. max_states: of an automaton; 0 for no automata.
    """

    def __init__(
        self,
        backend: Callable[[], GrammarBackend],
        *,
        threads: int,
        kept: int,
        max_states: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_backend = backend
        self._backend: GrammarBackend | None = None
        self._making = threading.Lock()
        self._threads, self._kept, self._clock = threads, kept, clock
        self._max_states = max_states
        self._jobs: OrderedDict[tuple[StructuredOutputsParams, bool], Job] = OrderedDict()
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._active = self._lost = 0
        self._ready_at: float | None = None  # when the backend was made

    def submit(self, params: StructuredOutputsParams, matchers: bool = False) -> Job:
        """The job of `params`: an old one if it is remembered. A failed one is tried again. matchers: an automaton will not do."""
        wanted = params, matchers or not self._max_states
        job = self._jobs.get(wanted)
        if job is not None and not job.error and not job.given_up:
            self._jobs.move_to_end(wanted)
            return job
        job = self._jobs[wanted] = Job(*wanted, self._clock())
        self._jobs.move_to_end(wanted)
        done = [key for key, each in self._jobs.items() if each.done]
        for key in done[: max(len(self._jobs) - self._kept, 0)]:
            del self._jobs[key]
        with self._changed:
            self._queue.append(job)
            self._start()
        return job

    def age(self, job: Job, now: float) -> float:
        """Seconds for which the job waits or runs. Those in which the backend is made, once, do not count."""
        return 0.0 if self._ready_at is None else now - max(job.submitted, self._ready_at)

    def give_up(self, job: Job) -> None:
        """Nobody waits for the job any more. A thread cannot be stopped: it goes on, and another one takes its place."""
        with self._changed:
            if job.done or job.given_up:
                return
            job.given_up = True
            if job.running:
                self._active -= 1
                self._lost += 1
            self._start()

    def wait(self, seconds: float) -> None:
        """Until a job is done, at most so long."""
        with self._changed:
            self._changed.wait(seconds)

    def _start(self) -> None:
        """Start the threads that there is work and room for. The lock is held."""
        for _ in range(sum(not job.given_up for job in self._queue)):
            if self._active >= self._threads or self._lost >= MOST_LOST * self._threads:
                return
            self._active += 1
            threading.Thread(target=self._work, name="modelrunner-grammar", daemon=True).start()

    def _next(self) -> Job | None:
        while self._queue:
            job = self._queue.popleft()
            if not job.given_up:
                job.running = True
                return job
        return None

    def _work(self) -> None:
        """A thread: jobs until there are none, or until one was given up meanwhile."""
        while True:
            with self._changed:
                job = self._next()
                if job is None:
                    self._active -= 1
                    return
            if not job.matchers:
                job.automaton, job.reason = self._automaton(job.params)
            grammar, error = (None, "") if job.automaton is not None else self._compiled(job.params)
            with self._changed:
                job.grammar, job.error, job.done = grammar, error, True
                job.vocabulary = self._backend.vocabulary if self._backend is not None else None
                self._changed.notify_all()
                if job.given_up:
                    self._lost -= 1
                    self._start()
                    return

    def _made_backend(self) -> GrammarBackend:
        with self._making:
            if self._backend is None:
                self._backend = self._make_backend()
                self._ready_at = self._clock()
        return self._backend

    def _automaton(self, params: StructuredOutputsParams) -> tuple[Automaton | None, str]:
        """The automaton, or why there is none. What is wrong with the grammar is for `compile` to say."""
        try:
            backend = self._made_backend()
            automaton = backend.automaton(params, self._max_states)
            if automaton.num_states > self._max_states:
                return None, f"it takes more than {self._max_states} states"
            _ = backend.vocabulary.packed  # made here, once, and not in the loop
            return automaton, ""
        except Exception as error:
            return None, str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"

    def _compiled(self, params: StructuredOutputsParams) -> tuple[Grammar | None, str]:
        try:
            return self._made_backend().compile(params), ""
        except (ValueError, ModelRunnerError) as error:
            text = str(error) or type(error).__name__
        except Exception as error:  # whatever a library raises is this request's failure, and nobody else's
            text = f"{type(error).__name__}: {error}"
        return None, text if text.startswith("structured_outputs") else f"structured_outputs.{params.kind}: {text}"
