"""Python functions over the logits of one request: the slow way, for trying things out."""

from __future__ import annotations

import itertools
from asyncio import CancelledError
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from modelrunner.batch import PROCESSOR_BIT, Feature
from modelrunner.errors import kind_of
from modelrunner.request_table import Column
from modelrunner.sampler.base import Stage
from modelrunner.sampling_values import FUNCTIONS

if TYPE_CHECKING:
    from modelrunner.batch import Batch
    from modelrunner.request import Request, SamplingParams
    from modelrunner.settings import RunnerSettings


class Functions(Stage):
    """`f(prompt_ids, output_ids, logits) -> logits` for each row that has such functions, one after the other.

    The functions want the tokens themselves, so the host waits, in the middle of enqueuing the step, for the device to have come there:
    the history is the device's own, whatever is in flight. Only steps with such a row wait, and they are not captured; the row has no
    drafts. A request is found by a number in the column `functions`, which names it for as long as somebody holds it. What a function
    raises ends its own request.
    """

    feature = Feature(PROCESSOR_BIT)
    uncaptured = feature
    undrafted = feature

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._requests: WeakValueDictionary[int, Request] = WeakValueDictionary()

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        return (Column(FUNCTIONS, torch.int32),)

    def row_values(self, request: Request) -> Mapping[str, int]:
        if FUNCTIONS not in request.params.logits_processors:
            return {}
        number = next(self._numbers)
        self._requests[number] = request
        return {FUNCTIONS: number}

    def features(self, params: SamplingParams) -> Feature:
        return self.feature if FUNCTIONS in params.logits_processors else Feature.GREEDY

    def edit(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        numbers = torch.where(batch.samples, batch.per_row(FUNCTIONS), 0).tolist()
        for i, number in enumerate(numbers):
            request = self._requests.get(number)
            if request is None:  # the row has none, or its request has ended and its record will be dropped
                continue
            logits[i] = self._changed(request, history(batch, i), logits[i])
        return logits

    def _changed(self, request: Request, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        """The row's logits after its functions; -inf everywhere, so that the request ends with an error, if one failed."""
        start = len(request.prompt_token_ids)
        changed = logits
        for function in request.params.logits_processors[FUNCTIONS]["functions"]:
            try:
                changed = function(tokens[:start], tokens[start:], changed.clone())
                problem = result_problem(changed, logits)
                changed = changed if problem else changed.to(logits)
            except (Exception, CancelledError) as error:
                problem = f"it raised {type(error).__name__}: {error}"
            if problem:
                request.failure = f"logits_processors: the function {getattr(function, '__name__', function)!r} failed: {problem}"
                return torch.full_like(logits, -torch.inf)
        return changed


def history(batch: Batch, at: int) -> list[int]:
    """Every token of row `at` of the step so far. Waits for the device."""
    row = batch.rows[at].long()
    known = int(batch.columns["known"][row])
    ids: list[int] = batch.columns["token_ids"][row, :known].tolist()
    return ids


def result_problem(changed: Any, logits: torch.Tensor) -> str:
    """Why `changed` cannot stand for `logits` [V]; empty if it can."""
    if not isinstance(changed, torch.Tensor):
        return f"it returned {kind_of(changed)}; a tensor is needed"
    if changed.shape != logits.shape or not changed.is_floating_point():
        return f"it returned {list(changed.shape)} {changed.dtype}; {list(logits.shape)} of a float type is needed"
    if changed.layout != torch.strided or changed.is_meta:
        return f"it returned a tensor of layout {changed.layout} on {changed.device}; a dense one with data is needed"
    return ""
