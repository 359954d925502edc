"""Requests with structured output: their grammars, their matchers, and the masks that the sampler applies.

There are two ways. A grammar that is a small **automaton** is loaded onto the device (see `automaton_arena`), which then finds a row's
masks by itself: such a row is like any other, and the host does nothing for it. All else has a **guide**. A request's way is settled when
its grammar is compiled, which happens in other threads (see `compiling`); then it gets its row.

The idea of guides: a request's next mask depends on its last token, which the host knows one step later. So such a row is **held**, left
out of plans, from the step that samples its token until that was collected and its next mask is there; all other rows go on. Its mask lies
in the seat of an allow list, and travels with the patch of the plan that samples with it. Masks are filled after the next step was
launched, while the device works. What takes too long then stays held for another step: nobody waits for it. A call of a matcher cannot be
broken off, though, and others do wait for a single one: a request whose matcher takes more than `grammar.token_seconds` for a token ends.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from modelrunner.automaton_arena import AutomatonArena
from modelrunner.batch import Feature, Int32Array
from modelrunner.compiling import Compiler, Job
from modelrunner.errors import RequestError
from modelrunner.grammar import BITS, GrammarBackend, Mask, Matcher
from modelrunner.sampler.allowed import bitmask
from modelrunner.sampler.automata import STATE

if TYPE_CHECKING:
    from modelrunner.request import Request
    from modelrunner.scheduler import Scheduler
    from modelrunner.settings import GrammarSettings
    from modelrunner.step_books import Committed

COLUMN = "allowed_ids"  # whose seats hold the masks
MOST_WAYS = 64  # that are counted apart
DEAD_END = "structured_outputs: no token of the vocabulary continues the output"
NARROWING = ("allowed_token_ids", "bad_words", "min_tokens")  # parameters that take tokens away from a grammar


class End(NamedTuple):
    """How a request ends by its grammar."""

    request: Request
    reason: str
    stop_reason: str | None = None


class Guide:
    """One request's way through its grammar. column: whose seat holds the mask. mask: [words] int32, of the next token; `advance` changes
    it in place. num_accepted: output tokens that the matcher has seen."""

    column = COLUMN

    def __init__(self, request: Request, words: int, allowed: Mask | None) -> None:
        """allowed: the request's allow list as a mask."""
        self.mask: Mask = np.zeros(words, np.int32)
        self.num_accepted = 0
        self.matcher: Matcher | None = None
        self._request = request
        self._stops, self._allowed = self.mask, allowed

    def begin(self, matcher: Matcher, stops: Mask) -> End | None:
        """The grammar is compiled. stops: the ids that end an output. Returns how the request ends, if no token is possible."""
        self.matcher, self._stops = matcher, stops
        return self._fill()

    def advance(self, tokens: Int32Array) -> End | None:
        """Take in new output tokens, and make the next mask. Returns how the request ends, if it does."""
        assert self.matcher is not None, "a request without a grammar has no row, and so no tokens"
        for token in tokens.tolist():
            self.num_accepted += 1
            if self._stops[token // BITS] >> token % BITS & 1:
                return End(self._request, "stop")
            if not self.matcher.accept(token):
                place = self.num_accepted - 1
                return End(self._request, "error", f"structured_outputs: the grammar does not take token {token} at output token {place}")
        return self._fill()

    def _fill(self) -> End | None:
        assert self.matcher is not None
        mask = self.mask
        self.matcher.fill(mask)
        if not (mask & ~self._stops).any():
            if mask.any():
                return End(self._request, "stop")  # complete: only the end can follow
            return End(self._request, "error", DEAD_END)
        if self._allowed is not None:
            mask &= self._allowed
            if not mask.any():
                return End(self._request, "error", contradiction(self._request, self.num_accepted))
        return None


class Guides:
    """All requests with structured output of an engine. Called by the loop, in its thread.

    backend: makes the grammar backend. problem: why there is none, or empty. vocab_size: ids of the model's logits. arena: for automata, or
    why there is none. ways: how many requests went which way: "device", or "host: " and why.
    """

    def __init__(
        self,
        backend: Callable[[], GrammarBackend],
        problem: str,
        settings: GrammarSettings,
        vocab_size: int,
        arena: AutomatonArena | None = None,
    ) -> None:
        self.problem, self.arena, self._settings = problem, arena, settings
        self.ways: Counter[str] = Counter()
        self._words = -(-vocab_size // BITS)
        most = 0 if arena is None else min(settings.automaton_states, arena.num_states)
        self._compiler = Compiler(backend, threads=settings.compile_threads, kept=settings.kept_grammars, max_states=most)
        self._compiling: dict[Request, Job] = {}
        self._late: deque[Request] = deque()  # have a new token and no mask for the next one

    def open(self, request: Request) -> None:
        """Give a request that asks for structured output its guide. Raises RequestError for too large a grammar, or without a backend."""
        params = request.params.structured_outputs
        if params is None:
            return
        if self.problem:
            raise RequestError(f"structured_outputs: no grammar backend is there. {self.problem}")
        if params.size > self._settings.max_bytes:
            raise RequestError(
                f"structured_outputs.{params.kind}: got {params.size} bytes; accepted: at most {self._settings.max_bytes} "
                "(setting grammar.max_bytes)"
            )
        listed = request.params.allowed_token_ids
        allowed = None if listed is None else bitmask(listed, self._words)
        request.guide = Guide(request, self._words, allowed)

    def start(self, request: Request) -> None:
        """The request was queued: have its grammar compiled."""
        if request.guide is not None:
            assert request.params.structured_outputs is not None
            self._compiling[request] = self._compiler.submit(request.params.structured_outputs)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if request.place is not None and self.arena is not None:
            self.arena.release(request.place)
        if request.guide is None:
            return
        request.guide.matcher = None
        job = self._compiling.pop(request, None)
        if job is not None and job not in self._compiling.values():
            self._compiler.give_up(job)

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    def wait(self, seconds: float) -> None:
        """Until a grammar is compiled, at most so long; not at all while one is loaded."""
        if self.arena is None or not self.arena.busy:
            self._compiler.wait(seconds)

    def poll(self, now: float, scheduler: Scheduler) -> list[End]:
        """Let requests go on whose grammar is compiled, and loaded if it is an automaton. Returns those that end instead. now: monotonic
        seconds."""
        ends = []
        if self.arena is not None:
            self.arena.advance()
        for request, job in list(self._compiling.items()):
            if not job.done and self._compiler.age(job, now) <= self._settings.compile_limit:
                continue
            if job.done and job.automaton is not None:
                self._take_place(request, job, scheduler)
                continue
            if job.grammar is not None:
                self._count(request, f"host: {job.reason or 'grammar.automaton_memory is 0'}")
            end = self._begin(request, job)
            if end is None:
                scheduler.ready(request)
            else:
                ends.append(end)
            self._compiling.pop(request)
            if not job.done:
                self._compiler.give_up(job)
        return ends

    def _take_place(self, request: Request, job: Job, scheduler: Scheduler) -> None:
        """Give the request the way of automata once its own is loaded; or have its grammar compiled for matchers after all."""
        assert self.arena is not None
        assert job.automaton is not None
        assert job.vocabulary is not None
        if request.place is None:
            place = self.arena.place(job.params, job.automaton, job.vocabulary)
            if isinstance(place, str):
                self._with_matcher(request, place)
                return
            request.place = place
        if request.place.problem:
            self.arena.release(request.place)
            problem, request.place = request.place.problem, None
            self._with_matcher(request, problem)
        elif request.place.ready:
            self._compiling.pop(request)
            request.guide = None
            request.features |= int(Feature.AUTOMATON)
            if request.params.allowed_token_ids is None:
                request.features &= ~int(Feature.ALLOWED)
            self._count(request, "device")
            scheduler.revalue(request)
            scheduler.ready(request)

    def _with_matcher(self, request: Request, reason: str) -> None:
        assert request.params.structured_outputs is not None
        job = self._compiling[request] = self._compiler.submit(request.params.structured_outputs, matchers=True)
        job.reason = reason

    def _count(self, request: Request, way: str) -> None:
        request.grammar_way = way
        self.ways[way if way in self.ways or len(self.ways) < MOST_WAYS else "host: for other reasons"] += 1

    def row_values(self, request: Request) -> dict[str, int]:
        """Column values of a row that is given to the request."""
        return {} if request.place is None else {STATE: request.place.line_after(request.output_token_ids)}

    def _begin(self, request: Request, job: Job) -> End | None:
        assert request.guide is not None
        if not job.done:
            limit = self._settings.compile_limit
            assert request.params.structured_outputs is not None
            kind = request.params.structured_outputs.kind
            text = f"structured_outputs.{kind}: it was not compiled within {limit} seconds (setting grammar.compile_limit)"
            return End(request, "error", text)
        if job.grammar is None:
            return End(request, "error", job.error)
        assert job.vocabulary is not None
        request.num_draft = 0  # whose masks would be those of tokens that the host does not know
        guide, grammar, stops = request.guide, job.grammar, bitmask(job.vocabulary.stop_ids, self._words)
        return self._timed(request, lambda: guide.begin(grammar.matcher(), stops))

    def take(self, committed: Committed, scheduler: Scheduler) -> None:
        """A step was committed: note whose mask is to be made, and say of those that ended what their grammar says of it."""
        for request in committed.finished:
            if request.guide is not None:
                self._judge(request)
            elif request.place is not None and request.finish_reason == "error" and request.stop_reason is None:
                self._explain(request)
        if scheduler.num_guided:
            self._late.extend(scheduler.guided(committed.rows))

    def _judge(self, request: Request) -> None:
        """An output that is complete with its last token is no shorter than it should be; one that has no token has a reason."""
        guide = request.guide
        assert guide is not None
        if request.finish_reason == "error" and request.stop_reason is None:
            request.stop_reason = contradiction(request, guide.num_accepted)
        elif request.finish_reason == "length":
            end = self._advance(request, np.array(request.output_token_ids[guide.num_accepted :], np.int32))
            if end is not None and end.reason == "stop":
                request.finish_reason = "stop"

    def _explain(self, request: Request) -> None:
        """Why a request with an automaton found no token."""
        assert request.place is not None
        if any(getattr(request.params, name) for name in NARROWING):
            request.stop_reason = contradiction(request, len(request.output_token_ids))
        elif not request.place.goes_on(request.output_token_ids):
            request.stop_reason = DEAD_END

    def fill(self, scheduler: Scheduler, in_flight: bool) -> list[End]:
        """Make the masks that are missing, at least one, until `grammar.fill_seconds` have passed, or `grammar.token_seconds` if no step is
        in flight. Returns requests that end by their grammar."""
        ends = []
        stop = time.perf_counter() + (self._settings.fill_seconds if in_flight else self._settings.token_seconds)
        while self._late:
            request = self._late.popleft()
            guide = request.guide
            if guide is None or guide.matcher is None:
                continue  # it has ended
            end = self._advance(request, scheduler.tokens_of(request)[guide.num_accepted :])
            if end is None:
                scheduler.ready(request)
            else:
                ends.append(end)
            if time.perf_counter() >= stop:
                break
        return ends

    def _advance(self, request: Request, tokens: Int32Array) -> End | None:
        guide = request.guide
        assert guide is not None
        return self._timed(request, lambda: guide.advance(tokens))

    def _timed(self, request: Request, work: Callable[[], End | None]) -> End | None:
        """What a guide says, or that its matcher raised or took too long for the others. Only time that this thread computes is counted: on
        a busy machine it may have waited for its turn."""
        began = time.thread_time()
        try:
            end = work()
        except Exception as error:
            return End(request, "error", failed(error))
        taken = time.thread_time() - began
        if end is None and taken > self._settings.token_seconds:
            return End(request, "error", too_slow(request, taken, self._settings.token_seconds))
        return end


def failed(error: Exception) -> str:
    """The stop reason of a request whose matcher raised."""
    return f"structured_outputs: the grammar backend failed: {type(error).__name__}: {error}"


def too_slow(request: Request, taken: float, limit: float) -> str:
    """The stop reason of a request whose matcher takes longer for a token than it may."""
    params, guide = request.params.structured_outputs, request.guide
    assert params is not None
    assert guide is not None
    return (
        f"structured_outputs.{params.kind}: the grammar is too costly: its matcher took {taken:.3g} seconds after {guide.num_accepted} "
        f"output tokens; accepted: at most {limit:g} for a token (setting grammar.token_seconds), for others wait meanwhile. Repetitions "
        "within repetitions, and parts that match the same text in many ways, cost the most"
    )


def contradiction(request: Request, num_tokens: int) -> str:
    """Why there is no token that the grammar and the other parameters both allow, after so many output tokens."""
    others = [name for name in NARROWING if getattr(request.params, name)]
    names = " and ".join(["structured_outputs", *others])
    return f"{names}: together they leave no token after {num_tokens} output tokens"
