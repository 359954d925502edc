"""From committed tokens to what users see: text, stop strings, and the outputs of each step.

Only requests that stream or have stop strings are looked at while they run; all others cost nothing until they finish.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from modelrunner.logprobs import LogprobLists
from modelrunner.request import CompletionOutput, OutputKind, Request, RequestMetrics, RequestOutput
from modelrunner.text import OutputText, Tokenizer, detokenize

Extra = Callable[[Request, int, int], Mapping[str, npt.NDArray[Any]]]


class CommittedTokens(Protocol):
    """What a collected step added (the scheduler's `Committed`).

    rows [M]: rows with new tokens. tokens [M, 1+k], of which num_tokens [M] count. finished: requests that ended with this step; they
    have left their row, and all their output is in `output_token_ids`.
    """

    @property
    def rows(self) -> npt.NDArray[np.int32]: ...

    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...

    @property
    def num_tokens(self) -> npt.NDArray[np.int32]: ...

    @property
    def finished(self) -> Sequence[Request]: ...


class RowHolders(Protocol):
    """Who holds which row of the request table; the scheduler knows."""

    def request_at(self, row: int) -> Request | None: ...


class StreamState:
    """What was seen and what was given out of one watched request. token_ids: output tokens seen. text: None without a tokenizer.

    prompt_token_ids: a copy that every output of the request shares. failure: what the tokenizer raised; there is no more text after it.
    """

    def __init__(self, request: Request, text: OutputText | None) -> None:
        self.request = request
        self.prompt_token_ids = tuple(request.prompt_token_ids)
        self.text = text
        self.token_ids: list[int] = []
        self.given_characters = 0
        self.given_tokens = 0
        self.failure: str | None = None

    def feed(self, token_ids: Sequence[int], last: bool = False) -> None:
        self.token_ids.extend(token_ids)
        if self.text is None or self.failure is not None:
            return
        try:
            self.text.feed(token_ids)
            if last:
                self.text.finish()
        except Exception as error:  # an id that the tokenizer lacks ends its own request, not the step
            self.failure = failed_text(error)

    def take(self) -> tuple[str, list[int], int]:
        """(text, ids, place of the first id in the output) for an output of the request's kind: what is new for DELTA, else all."""
        text = "" if self.text is None else self.text.text[: self.text.visible]
        ids = self.token_ids
        if self.request.params.output_kind is OutputKind.DELTA:
            new = text[self.given_characters :], ids[self.given_tokens :], self.given_tokens
            self.given_characters, self.given_tokens = len(text), len(ids)
            return new
        return text, list(ids), 0


def failed_text(error: Exception) -> str:
    """The stop reason of a request whose ids the tokenizer could not turn into text."""
    return f"the tokenizer failed: {type(error).__name__}: {error}"


class OutputProcessor:
    """Builds `RequestOutput`s. tokenizer: None when there is no text. extra: (request, start, stop) -> what taps report of these output
    tokens, by name. clock: monotonic seconds. weight_version: goes into the outputs; the engine sets it. logprobs: makes lists of them."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        holders: RowHolders,
        extra: Extra | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.weight_version = "0"
        self.logprobs = LogprobLists(tokenizer)
        self._tokenizer = tokenizer
        self._holders = holders
        self._extra = extra
        self._clock = clock
        self._watched: dict[Request, StreamState] = {}  # not by id: an aborted one's may be taken again before its end is told
        self._place = np.zeros(0, np.int64)  # of each row among those of a step; what earlier steps left in it counts for nothing

    @property
    def num_watched(self) -> int:
        """Requests that stream or have stop strings and have not ended."""
        return len(self._watched)

    def add(self, request: Request) -> None:
        """A request was queued."""
        params = request.params
        if params.output_kind is OutputKind.FINAL_ONLY and not params.stop:
            return
        text = None
        if self._tokenizer is not None and params.detokenize:
            prompt = request.prompt_token_ids
            stops = (params.stop, params.include_stop_str_in_output)
            text = OutputText(self._tokenizer, prompt, *stops, params.skip_special_tokens, params.min_tokens)
        self._watched[request] = StreamState(request, text)

    def process(self, committed: CommittedTokens) -> tuple[list[RequestOutput], list[tuple[Request, int, str, str]]]:
        """Outputs of a collected step, and the requests to end: (request, output tokens to keep, finish reason, stop reason). The finish
        reason is `stop`, the other then the stop string, or `error`, for text that cannot be decoded.

        The caller ends these in the scheduler and then asks for their last output by `finish`. Requests in `committed.finished` have their
        last output among those returned.
        """
        outputs = [self.finish(request) for request in committed.finished]
        stopped: list[tuple[Request, int, str, str]] = []
        if not self._watched:
            return outputs, stopped
        for state, at in self._touched(committed.rows):
            request = state.request
            state.feed(committed.tokens[at, : committed.num_tokens[at]].tolist())
            if state.failure is not None:
                stopped.append((request, len(state.token_ids), "error", state.failure))
            elif state.text is not None and state.text.match is not None:
                stopped.append((request, state.text.num_tokens, "stop", state.text.match.stop))
            elif request.params.output_kind is not OutputKind.FINAL_ONLY:
                outputs.append(self._output(request, state.prompt_token_ids, *state.take()))
        return outputs, stopped

    def _touched(self, rows: npt.NDArray[np.int32]) -> Iterator[tuple[StreamState, int]]:
        """Watched requests that hold one of `rows`, with its place; the shorter of the two lists is gone through in Python."""
        if not len(rows):
            return
        if len(self._watched) > len(rows):
            for at, row in enumerate(rows.tolist()):
                request = self._holders.request_at(row)
                if request is not None and request in self._watched:
                    yield self._watched[request], at
            return
        states = list(self._watched.values())
        places = self._places(rows, np.fromiter((state.request.row for state in states), np.int64, len(states)))
        for i in np.flatnonzero(places >= 0).tolist():
            state = states[i]
            if self._holders.request_at(state.request.row) is state.request:
                yield state, int(places[i])

    def _places(self, rows: npt.NDArray[np.int32], wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where each of `wanted` (-1: no row) stands in `rows` (each once, at least one); -1 for what is not there."""
        highest = int(rows.max())
        if highest >= len(self._place):
            self._place = np.zeros(highest + 1, np.int64)
        self._place[rows] = np.arange(len(rows))
        possible = (wanted >= 0) & (wanted <= highest)
        places = np.where(possible, self._place[np.where(possible, wanted, 0)], 0)
        found: npt.NDArray[np.int64] = np.where((places < len(rows)) & (rows[np.minimum(places, len(rows) - 1)] == wanted), places, -1)
        return found

    def finish(self, request: Request) -> RequestOutput:
        """The last output of a request that ended; forgets it.

        A stop string that the last tokens completed cuts the request's ids and becomes its finish reason here.
        """
        state = self._watched.pop(request, None)
        if state is None:
            return self._output(request, tuple(request.prompt_token_ids), self._whole_text(request), list(request.output_token_ids), 0)
        seen = len(state.token_ids)
        state.feed(request.output_token_ids[seen:], last=True)
        if state.failure is not None:
            request.finish_reason, request.stop_reason = "error", state.failure
        elif state.text is not None and state.text.match is not None:
            del request.output_token_ids[state.text.num_tokens :]
            request.finish_reason, request.stop_reason = "stop", state.text.match.stop
        del state.token_ids[len(request.output_token_ids) :]
        return self._output(request, state.prompt_token_ids, *state.take())

    def _whole_text(self, request: Request) -> str:
        if self._tokenizer is None or not request.params.detokenize:
            return ""
        try:
            return detokenize(self._tokenizer, request.prompt_token_ids, request.output_token_ids, request.params.skip_special_tokens)
        except Exception as error:
            request.finish_reason, request.stop_reason = "error", failed_text(error)
            return ""

    def age(self, requests: Iterable[Request]) -> None:
        """The weights are about to get another version: what waiting requests have is of this one, and a prompt that is not computed to its
        end has no log-probs any more."""
        for request in requests:
            if (count := len(request.output_token_ids)) > request.older[0]:
                request.older = count, self.weight_version
            if request.logprobs is not None and request.logprobs.lacks_prompt:
                request.logprobs.prompt.clear()

    def _output(self, request: Request, prompt_token_ids: Sequence[int], text: str, token_ids: list[int], start: int) -> RequestOutput:
        ended = request.finish_reason is not None
        metrics = RequestMetrics(request.arrival, request.first_token_time, self._clock() if ended else None, request.num_preemptions)
        extra = {} if self._extra is None else self._extra(request, start, start + len(token_ids))
        logprobs, total = self.logprobs.output(request, start, start + len(token_ids))
        drafts, (old, version) = (request.num_drafted, request.num_accepted), request.older
        completion = CompletionOutput(0, text, token_ids, request.finish_reason, request.stop_reason, extra, logprobs, total, *drafts)
        return RequestOutput(
            request.id,
            request.prompt,
            prompt_token_ids,
            [completion],
            ended,
            metrics,
            num_cached_tokens=request.num_cached_tokens,
            weight_version=version if 0 < start + len(token_ids) <= old else self.weight_version,
            prompt_logprobs=self._prompt_logprobs(request),
        )

    def _prompt_logprobs(self, request: Request) -> Any:
        """Those of the prompt, once for outputs that hold what is new."""
        held = request.logprobs
        if held is None or (held.prompt_given and request.params.output_kind is OutputKind.DELTA):
            return None
        held.prompt_given = True
        return self.logprobs.prompt(request)
