"""Several answers to one prompt (`SamplingParams.n`): a request for each, told to the caller as one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from modelrunner.errors import RequestError
from modelrunner.logprobs import RequestLogprobs
from modelrunner.request import CompletionOutput, OutputKind, Request, RequestMetrics, RequestOutput, SamplingParams


def choices_of(request: Request) -> list[Request]:
    """The requests that answer it, which differ in id, choice and their own state; itself, if one answer is wanted."""
    if request.params.n == 1:
        return [request]
    fork, last = secrets.token_hex(8), request.params
    if last.prompt_logprobs is not None:  # of one prompt, and who asks for them takes none of it from the cache
        last = last.model_copy(update={"prompt_logprobs": None})
    own = (request.params, *[last] * (request.params.n - 1))
    return [
        replace(
            request, id=f"{request.id}#{i}", choice=i, fork=fork, params=params, logprobs=logprobs_of(request, params),
            output_token_ids=[], extra={}, tap_values={}, results=[],
        )
        for i, params in enumerate(own)
    ]  # fmt: skip


def logprobs_of(request: Request, params: SamplingParams) -> RequestLogprobs | None:
    """An empty place for the log-probs of one choice."""
    held = request.logprobs
    if held is None or (params.logprobs is None and params.prompt_logprobs is None):
        return None
    return RequestLogprobs(held.num_top, None if params.prompt_logprobs is None else held.num_prompt_top, held.prompt_length)


class Told:
    """What was told of the choices of one request so far."""

    def __init__(self, request: Request) -> None:
        self.id = request.id
        self.kind = request.params.output_kind
        self._asks = request.params.logprobs is not None
        self._last: list[RequestOutput | None] = [None] * request.params.n
        self._new: dict[int, RequestOutput] = {}

    @property
    def finished(self) -> bool:
        return all(output is not None and output.finished for output in self._last)

    def take(self, choice: int, output: RequestOutput) -> RequestOutput | None:
        """Take in an output of a choice. An output for the caller, if that one must go out first."""
        unlike = choice in self._new or any(each.weight_version != output.weight_version for each in self._new.values())
        first = self.output() if self.kind is OutputKind.DELTA and unlike else None
        self._last[choice] = self._new[choice] = output
        return first

    def output(self) -> RequestOutput | None:
        """The output for what was taken in since the last one: of kind `delta` the choices with something new, else all of them."""
        finished, shown = self.finished, dict(enumerate(self._last))
        if not self._new or (self.kind is OutputKind.FINAL_ONLY and not finished):
            return None
        if self.kind is OutputKind.DELTA:
            shown = dict(sorted(self._new.items()))
        base, first = next(iter(self._new.values())), self._new.get(0)
        prompt_logprobs = None if first is None else first.prompt_logprobs
        if self.kind is not OutputKind.DELTA and self._last[0] is not None:
            prompt_logprobs = self._last[0].prompt_logprobs
        self._new = {}
        known = [output for output in self._last if output is not None]
        return replace(
            base if self._last[0] is None else self._last[0],
            request_id=self.id,
            prompt_logprobs=prompt_logprobs,
            outputs=[self._completion(i, output) for i, output in shown.items()],
            finished=finished,
            metrics=merged([output.metrics for output in known], finished),
            weight_version=base.weight_version,
        )

    def _completion(self, choice: int, output: RequestOutput | None) -> CompletionOutput:
        """The answer of a choice, empty if nothing is known of it."""
        if output is not None:
            return replace(output.outputs[0], index=choice)
        return CompletionOutput(choice, "", [], logprobs=[], cumulative_logprob=0.0) if self._asks else CompletionOutput(choice, "", [])


def merged(metrics: Sequence[RequestMetrics], finished: bool) -> RequestMetrics:
    """Of all choices: the first arrival and token, the last end, and all preemptions."""
    first = [m.first_token_time for m in metrics if m.first_token_time is not None]
    ends = [m.finished_time for m in metrics if m.finished_time is not None]
    return RequestMetrics(
        min(m.arrival_time for m in metrics),
        min(first, default=None),
        max(ends, default=None) if finished else None,
        sum(m.num_preemptions for m in metrics),
    )


class Choices:
    """The unfinished requests of an engine that have several choices."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[Told, list[Request]]] = {}
        self._owner: dict[str, tuple[Told, int]] = {}  # by the id of a choice

    def open(self, request: Request, choices: Sequence[Request]) -> None:
        """From now on outputs of `choices` are outputs of `request`."""
        told = Told(request)
        self._told[request.id] = told, list(choices)
        self._owner.update({each.id: (told, each.choice) for each in choices})

    def check(self, request_id: str) -> None:
        """Raise RequestError for an id that is in use."""
        if request_id in self._told or request_id in self._owner:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request; choose another")

    def ids(self, request_id: str) -> list[str]:
        """Ids of the requests that answer `request_id`: its own, if it has one choice."""
        found = self._told.get(request_id)
        return [request_id] if found is None else [each.id for each in found[1]]

    def merge(self, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """Outputs of requests with several choices in place of outputs of these."""
        if not self._owner:
            return list(outputs)
        result: list[RequestOutput | None] = []
        touched: dict[str, Told] = {}
        for output in outputs:
            if (owner := self._owner.get(output.request_id)) is None:
                result.append(output)
                continue
            told, choice = owner
            result.append(told.take(choice, output))
            touched[told.id] = told
            if output.finished:
                del self._owner[output.request_id]
        result += [told.output() for told in touched.values()]
        self._close(touched)
        return [output for output in result if output is not None]

    def _close(self, touched: Mapping[str, Told]) -> None:
        for name, told in touched.items():
            if told.finished:
                del self._told[name]
