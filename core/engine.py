"""The engine: requests in, outputs out, one step at a time. The loop is plan, launch, collect, commit.

    engine = Engine({"model": "path/to/model"})
    engine.add_request("a", "Hello", SamplingParams(max_tokens=8))
    while engine.has_unfinished():
        for output in engine.step():
            ...

With `scheduler.pipeline_depth` 1 each step is collected before the next is planned: the plain loop. With 2 or more, step N+1 is planned and
launched while step N runs; the tokens are the same. Between steps the weights can be replaced (`update_weights`), and the cache's memory
given up for a while (`sleep`).
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from modelrunner.assemble import Assembly, assemble
from modelrunner.batch import Drain, Plan, Ticket
from modelrunner.checkpoint import ModelCard
from modelrunner.choices import Choices, choices_of
from modelrunner.dead_ends import say_why
from modelrunner.draft_policy import NO_DRAFTS
from modelrunner.errors import CapacityWarning, EngineError, RequestError, warn_caller
from modelrunner.guides import End
from modelrunner.live_weights import LiveWeights
from modelrunner.logprob_books import keep_logprobs
from modelrunner.memory_profile import weight_bytes
from modelrunner.new_weights import Pairs, check_version, pairs
from modelrunner.outputs import OutputProcessor
from modelrunner.page_pool import PagePool
from modelrunner.part_calls import PartCalls
from modelrunner.request import Prompt, Request, RequestOutput, SamplingParams, make_request, merged_eos
from modelrunner.sampling_params import shown
from modelrunner.scheduler import Scheduler
from modelrunner.settings import RunnerSettings
from modelrunner.step_books import Committed
from modelrunner.text import Tokenizer
from modelrunner.token_budget import usual_context
from modelrunner.watch import Watch

FIRST_WEIGHTS = "0"  # version of the weights that an engine starts with
COMPILING_SECONDS = 0.01  # at most, for a step in which nothing can run before a grammar is compiled
ENCODING_SECONDS = 0.01  # the same before media are encoded


class Engine:
    """Owns the device's state and runs the loop, in the caller's thread. Not thread-safe."""

    def __init__(self, settings: Mapping[str, Any] | None = None, *, plugins: Sequence[object] = ()) -> None:
        """settings: as for `load_settings`. plugins: plugin objects or module names, beside the installed ones."""
        self.assembly: Assembly = assemble(settings or {}, plugins)
        self.settings: RunnerSettings = self.assembly.settings
        self.card: ModelCard = self.assembly.card
        self.tokenizer: Tokenizer | None = self.assembly.tokenizer
        merged_eos(self.card, self.tokenizer)  # what is wrong with them is told now, not at the first request
        self.runner = self.assembly.runner
        self._calls = PartCalls(self.assembly)
        self.scheduler = self._scheduler(self.assembly)
        self._warn_of_small_cache()
        self.outputs = OutputProcessor(self.tokenizer, self.scheduler, self.assembly.taps.arrays)
        self.guides = self.assembly.guides
        self.media = self.assembly.media.books
        self.weights = LiveWeights(self.assembly)
        self.watch = Watch(self.assembly.observers, self.scheduler)
        self.tickets: deque[Ticket] = deque()
        self.requests: dict[str, Request] = {}  # one for each choice
        self.choices = Choices()
        self.failure: BaseException | None = None
        self.closed = False
        self._ended: list[Request] = []  # finished by the host since the last step
        self._ready: list[RequestOutput] = []  # collected between steps, or in a step that raised afterwards
        self._sleeping = False

    def _scheduler(self, parts: Assembly) -> Scheduler:
        scheduler = parts.settings.scheduler
        return Scheduler(
            groups=parts.layouts,
            pool=PagePool(parts.resolved.num_pages + 1),
            builder=parts.table.builder,
            row_values=self._calls.row_values,
            on_admit=self._calls.admit,
            on_remove=self._calls.remove,
            max_rows=scheduler.max_rows,
            max_batched_tokens=scheduler.max_batched_tokens,
            max_mixed_tokens=scheduler.max_mixed_tokens,
            usual_context=usual_context(weight_bytes(parts.state.module), parts.layouts, parts.resolved.page_bytes),
            max_model_len=parts.resolved.max_model_len,
            policy=scheduler.policy,
            chunked_prefill=scheduler.chunked_prefill,
            prefix_caching=parts.settings.cache.prefix_caching,
            seats=parts.table.seats,
            depth=scheduler.pipeline_depth,
            cache_seed=FIRST_WEIGHTS.encode(),
            media=parts.media.books,
            drafting=NO_DRAFTS if parts.runner.parts.drafting is None else parts.runner.parts.drafting.policy,
            shifted_cache=parts.runner.parts.drafting is not None and parts.runner.parts.drafting.needs.shifted,
        )

    def _warn_of_small_cache(self) -> None:
        holds, wanted = self.scheduler.max_tokens, self.assembly.resolved.max_model_len
        if holds < wanted:
            warn_caller(
                f"the cache of {self.assembly.resolved.num_pages} pages holds {holds} tokens of one request, less than max_model_len "
                f"({wanted}); longer requests are refused. Enlarge the cache, or set max_model_len={holds}",
                CapacityWarning,
            )

    # ---- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
        choice: int = 0,
        fork: str | None = None,
    ) -> None:
        """Queue a request. Raises RequestError, and takes nothing, when it cannot be served as it was put.

        prompt: as for `LLM.generate`; media are processed here, in the caller's time, unless `prepare_prompt` did it. priority: lower runs
        earlier under the `priority` policy. deadline: seconds from now after which it ends with finish reason `timeout`. choice, fork: for
        a caller that puts each of several answers to one prompt as a request of its own: which one it is, and what names them all.
        """
        self._check_alive()
        request = make_request(
            request_id,
            prompt,
            params,
            card=self.card,
            tokenizer=self.tokenizer,
            vocab_size=self.assembly.needs.vocab_size,
            max_model_len=self.assembly.resolved.max_model_len,
            priority=priority,
            deadline=deadline,
            cache_salt=cache_salt,
            seed=secrets.randbits(63),
            now=time.monotonic(),
            media=self.assembly.media.front,
        )
        self.choices.check(request_id)
        request.choice, request.fork = choice, fork
        requests = choices_of(request)
        taken: list[Request] = []
        try:
            for each in requests:
                self._queue(each)
                taken.append(each)
        except BaseException:
            for each in taken:
                self.scheduler.finish(each, "error")
                self.outputs.finish(each)
            raise
        if len(requests) > 1:
            self.choices.open(request, requests)
        for each in requests:
            self.requests[each.id] = each
            self.guides.start(each)
            self.watch.request_started(each)

    def _queue(self, request: Request) -> None:
        self._calls.accept(request)
        self.scheduler.add(request)
        try:
            self.outputs.add(request)
        except Exception as error:  # the tokenizer may have fewer ids than the model
            self.scheduler.finish(request, "error")
            raise RequestError(f"prompt: the tokenizer cannot turn its ids into text ({type(error).__name__}: {error})") from error

    def abort(self, request_id: str) -> None:
        """End a request now; its last output (finish reason `abort`) comes from the next `step`. An id that is not running is ignored.

        Raises RequestError for an id that is not a non-empty string.
        """
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"abort takes the id of one request, a non-empty string; got {shown(request_id)}")
        for each in self.choices.ids(request_id):
            if (request := self.requests.get(each)) is not None:
                self._finish(request, "abort")

    def has_unfinished(self) -> bool:
        """Whether another `step` has something to do or to report."""
        return bool(self.requests or self._ended or self.tickets or self._ready)

    def _finish(self, request: Request, reason: str, stop_reason: int | str | None = None, keep_output: int | None = None) -> None:
        self.scheduler.finish(request, reason, stop_reason, keep_output)
        self._ended.append(request)
        self._forget(request)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Plan and launch one step, collect what is due, and return the outputs that are new. While asleep nothing is planned.

        An exception of the model state or of the device's launch undoes the step, which can be tried again. An interrupt
        (KeyboardInterrupt) leaves the books half written: the engine cannot go on then. `LLM` holds interrupts back until a step is over.
        """
        self._check_alive()
        self._check_weights()
        now = time.monotonic()
        for request in self.scheduler.expire(now):
            self._ended.append(request)
            self._forget(request)
        self._end_waiting(self.guides.poll(now, self.scheduler))
        self._end_waiting(self.media.advance(self.scheduler))
        outputs = self._take_ready()
        try:
            plan = None if self._sleeping else self.scheduler.plan()
            if isinstance(plan, Drain):
                outputs += self._collect(keep=0)
                now = time.monotonic()
                plan = self.scheduler.plan(drained=True)
            assert not isinstance(plan, Drain), "a drained plan has nothing in flight to wait for"
            if plan is not None:
                self._launch(plan, now)
            self.watch.deliver()
            depth = self.settings.scheduler.pipeline_depth
            outputs += self._collect(keep=depth - 1 if plan is not None else max(len(self.tickets) - 1, 0))
            outputs += self._report_ended()
            if plan is None and not outputs and self.guides.num_compiling:
                self.guides.wait(COMPILING_SECONDS)
            elif plan is None and not outputs and self.media.num_in_flight:
                self.media.settle(ENCODING_SECONDS)
            if not self.tickets:  # no launch follows that observers could be told after
                self.watch.deliver()
            return self.choices.merge(outputs)
        except BaseException as error:
            self._ready = outputs
            if not isinstance(error, Exception):
                self.failure = error
            raise

    def drain(self) -> list[RequestOutput]:
        """Collect every step in flight and return the outputs that are new. Nothing is planned: requests stay where they are."""
        self._check_alive()
        return self.choices.merge(self._take_ready() + self._collect(keep=0) + self._report_ended())

    def _launch(self, plan: Plan, planning: float) -> None:
        planned = time.monotonic()
        try:
            self.tickets.append(self.runner.launch(plan))
        except EngineError as error:
            self.failure = error
            raise
        except BaseException:
            self.scheduler.rollback(plan)
            raise
        self.watch.launched(planning, planned)

    def _collect(self, keep: int) -> list[RequestOutput]:
        """Collect the oldest steps until `keep` are in flight."""
        outputs: list[RequestOutput] = []
        while len(self.tickets) > keep:
            ticket = self.tickets.popleft()
            waiting = time.monotonic()
            try:
                outcome = self.runner.collect(ticket)
            except Exception as error:
                self.failure = error
                raise EngineError(
                    f"step {ticket.plan.step} failed on device {self.assembly.device.name!r}: {type(error).__name__}: {error}"
                ) from error
            arrived = time.monotonic()
            if outcome.extra is not None:
                self.assembly.taps.keep(outcome, self.scheduler.rows, self.scheduler.request_at)
            if outcome.logprobs is not None:
                keep_logprobs(outcome, self.scheduler.rows, self.scheduler.request_at)
            committed = self.scheduler.commit(outcome)
            self.guides.take(committed, self.scheduler)
            say_why(committed.finished)
            outputs += self._process(committed)
            self.watch.committed(ticket.plan, waiting, arrived, committed)
        self._end_waiting(self.guides.fill(self.scheduler, in_flight=bool(self.tickets)))
        return outputs

    def _process(self, committed: Committed) -> list[RequestOutput]:
        outputs, stops = self.outputs.process(committed)
        for request in committed.finished:
            self._forget(request)
        for request, keep, reason, stop in stops:
            self._finish(request, reason, stop, keep)
        return outputs

    def _end_waiting(self, ends: Iterable[End]) -> None:
        for request, reason, stop_reason in ends:
            self._finish(request, reason, stop_reason)

    def _report_ended(self) -> list[RequestOutput]:
        ended, self._ended = self._ended, []
        return [self.outputs.finish(request) for request in ended]

    def _take_ready(self) -> list[RequestOutput]:
        ready, self._ready = self._ready, []
        return ready

    def _forget(self, request: Request) -> None:
        if self.requests.get(request.id) is request:  # its id may be another request's by now
            del self.requests[request.id]
            self.guides.forget(request)
            self.watch.request_finished(request)

    def _check_alive(self) -> None:
        if self.closed:
            raise EngineError("the engine was closed and takes no more work; make a new one") from self.failure
        if self.failure is not None:
            raise EngineError(f"the engine stopped because a step failed: {self.failure!r}") from self.failure

    # ---- between steps -------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> str:
        """Names the weights in use: "0" for those that the engine started with, then as `update_weights` was told."""
        return self.outputs.weight_version

    def update_weights(self, tensors: Pairs, version: str | None = None) -> None:
        """Replace the weights, in place, between two steps, and those of a drafter that lie with them. Requests may be running: they go on
        with the new ones.

        tensors: every tensor of a checkpoint under its checkpoint name, in pairs or a mapping, on any device. version: their name, for
        `RequestOutput.weight_version`; None for the number of updates so far. A running request keeps its tokens, and what the cache holds
        of it is computed again, so that each later token, and the log-probs of a prompt, come from one version of the weights. Cached
        prefixes are forgotten. Scales of a cache in 8 bits are replaced by those among the tensors, and else stay.
        Outputs collected on the way come from the next `step`.

        Raises CheckpointError when the tensors do not fit (see `weights.load_tensors`). When some had been stored by then, the weights are
        a mixture, and the engine takes no step until a later update succeeds.
        """
        self._check_alive()
        check_version(version)
        self._pause()
        self.scheduler.reset_prefix_cache()
        self.weights.replace(pairs(tensors))
        self.outputs.age(self.requests.values())
        self.media.reset()
        self.outputs.weight_version = str(self.weights.num_updates) if version is None else version
        self.scheduler.reset_prefix_cache(self.weight_version.encode())

    def reset_media_cache(self) -> None:
        """Forget what images and videos were encoded to, e.g. to measure. Requests that are computing some keep it until they have done."""
        self._check_alive()
        self.media.reset()

    def sleep(self) -> None:
        """Give the cache's memory up until `wake_up`. Running requests wait, keep their tokens and go on afterwards; cached prefixes are
        forgotten. Requests may be added and aborted meanwhile. Does nothing while asleep."""
        self._check_alive()
        if self._sleeping:
            return
        self._pause()
        self.scheduler.reset_prefix_cache()
        self._sleeping = True
        device = self.assembly.device
        device.synchronize()
        self.assembly.arena.free()
        device.trim()

    def wake_up(self) -> None:
        """Take the cache's memory again after `sleep`. Does nothing while awake."""
        self._check_alive()
        if not self._sleeping:
            return
        self.assembly.arena.restore()
        self.runner.graphs.forget()
        self.assembly.device.synchronize()
        self._sleeping = False

    @property
    def is_sleeping(self) -> bool:
        return self._sleeping

    def _pause(self) -> None:
        """Collect everything and let all running requests wait, so that nothing holds pages."""
        self._ready = self.drain()  # which takes what was ready before
        for request in list(self.requests.values()):
            self.scheduler.preempt(request.id)

    @property
    def weights_problem(self) -> str:
        """Why no step is taken: an update of the weights failed half-way, and no later one succeeded. Empty when nothing is wrong."""
        return self.weights.problem

    def _check_weights(self) -> None:
        if self.weights_problem:
            raise EngineError(self.weights_problem)

    def close(self) -> None:
        """Wait for the device. The engine takes no more work."""
        self.closed = True
        self.assembly.device.synchronize()
        self.watch.close()
