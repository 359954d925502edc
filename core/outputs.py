"""From committed tokens to what users see: text, stop strings, and the outputs of each step.

Only requests that stream or have stop strings are looked at while they run; all others cost nothing until they finish.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from modelrunner.request import CompletionOutput, OutputKind, Request, RequestMetrics, RequestOutput
from modelrunner.text import OutputText, Tokenizer, detokenize


class CommittedTokens(Protocol):
    """What a collected step added. M rows that still belong to their request, k drafts at most.

    rows [M]; tokens [M, 1+k]; num_tokens [M] how many of them count; finished: requests that ended with this step, all their output in
    `output_token_ids`.
    """

    @property
    def rows(self) -> npt.NDArray[np.int32]: ...

    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...

    @property
    def num_tokens(self) -> npt.NDArray[np.int32]: ...

    @property
    def finished(self) -> Sequence[Request]: ...


class StreamState:
    """What was seen and what was given out of one watched request. token_ids: output tokens seen. text: None without a tokenizer."""

    def __init__(self, request: Request, text: OutputText | None) -> None:
        self.request = request
        self.text = text
        self.token_ids: list[int] = []
        self.given_characters = 0
        self.given_tokens = 0

    def feed(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        if self.text is not None:
            self.text.feed(token_ids)

    def take(self) -> tuple[str, list[int]]:
        """(text, ids) for an output of the request's kind; what is new for DELTA, all for the others."""
        text = "" if self.text is None else self.text.text[: self.text.visible]
        ids = self.token_ids
        if self.request.params.output_kind is OutputKind.DELTA:
            new = text[self.given_characters :], ids[self.given_tokens :]
            self.given_characters, self.given_tokens = len(text), len(ids)
            return new
        return text, list(ids)


class OutputProcessor:
    """Builds `RequestOutput`s. tokenizer: None when there is no text. clock: monotonic seconds."""

    def __init__(self, tokenizer: Tokenizer | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._watched: dict[str, StreamState] = {}

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
            text = OutputText(self._tokenizer, prompt, params.stop, params.include_stop_str_in_output, params.skip_special_tokens)
        self._watched[request.id] = StreamState(request, text)

    def process(self, committed: CommittedTokens) -> tuple[list[RequestOutput], list[tuple[Request, int, str]]]:
        """Outputs of a collected step, and the requests that a stop string ended: (request, output tokens to keep, stop string).

        The caller ends these in the scheduler and then asks for their last output by `finish`. Requests in `committed.finished` have their
        last output among those returned.
        """
        outputs = [self.finish(request) for request in committed.finished]
        stopped: list[tuple[Request, int, str]] = []
        if not self._watched:
            return outputs, stopped
        place = {row: i for i, row in enumerate(committed.rows.tolist()) if committed.num_tokens[i]}
        for state in self._watched.values():
            request = state.request
            at = place.get(request.row)
            if at is None or request.finish_reason is not None:
                continue
            state.feed(committed.tokens[at, : committed.num_tokens[at]].tolist())
            if state.text is not None and state.text.match is not None:
                stopped.append((request, state.text.num_tokens, state.text.match.stop))
            elif request.params.output_kind is not OutputKind.FINAL_ONLY:
                outputs.append(self._output(request, *state.take()))
        return outputs, stopped

    def finish(self, request: Request) -> RequestOutput:
        """The last output of a request that ended; forgets it.

        A stop string that the last tokens completed cuts the request's ids and becomes its finish reason here.
        """
        state = self._watched.pop(request.id, None)
        if state is None:
            self._name_stop_id(request)
            return self._output(request, self._whole_text(request), list(request.output_token_ids))
        seen = len(state.token_ids)
        state.feed(request.output_token_ids[seen:])
        if state.text is not None:
            state.text.finish()
            if state.text.match is not None:
                del request.output_token_ids[state.text.num_tokens :]
                request.finish_reason, request.stop_reason = "stop", state.text.match.stop
        del state.token_ids[len(request.output_token_ids) :]
        self._name_stop_id(request)
        return self._output(request, *state.take())

    def _whole_text(self, request: Request) -> str:
        if self._tokenizer is None or not request.params.detokenize:
            return ""
        return detokenize(self._tokenizer, request.prompt_token_ids, request.output_token_ids, request.params.skip_special_tokens)

    @staticmethod
    def _name_stop_id(request: Request) -> None:
        """The device reports only that a stop id came; which one is the last token. An end-of-sequence id is no reason worth naming."""
        if request.finish_reason != "stop" or request.stop_reason is not None or not request.output_token_ids:
            return
        last = request.output_token_ids[-1]
        is_eos = last in request.eos_token_ids and not request.params.ignore_eos
        if last in request.params.stop_token_ids and not is_eos:
            request.stop_reason = last

    def _output(self, request: Request, text: str, token_ids: list[int]) -> RequestOutput:
        ended = request.finish_reason is not None
        metrics = RequestMetrics(request.arrival, request.first_token_time, self._clock() if ended else None, request.num_preemptions)
        completion = CompletionOutput(0, text, token_ids, request.finish_reason, request.stop_reason)
        return RequestOutput(
            request.id, request.prompt, request.prompt_token_ids, [completion], ended, metrics, num_cached_tokens=request.num_cached_tokens
        )
