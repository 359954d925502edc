"""Log-probs: how many of the likeliest tokens a row wants to know, at its output tokens and at those of its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from modelrunner.batch import Feature
from modelrunner.errors import RequestError
from modelrunner.request_table import Column
from modelrunner.sampler.base import Stage

if TYPE_CHECKING:
    from modelrunner.request import Request, SamplingParams
    from modelrunner.settings import RunnerSettings

UNLIMITED = -1  # of the setting sampler.max_logprobs; in a request, all of the vocabulary
USUAL = 20  # of the likeliest tokens that a record holds where the setting sets no limit
NOTHING = -1  # in a column


class Logprobs(Stage):
    """How many log-probs a row wants. The step's tail puts those of the likeliest tokens into a record a row (see `step_logprobs`); a row
    that wants more than a record holds gets the log-probs of its whole vocabulary, in a step that is not captured, and no
    drafts.

    recorded: the likeliest tokens in a record. processed: whether they tell what the token was drawn from, and not what the model gave.
    """

    undrafted = Feature.ALL_LOGPROBS

    def __init__(self) -> None:
        self.recorded = USUAL
        self.processed = False

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        limit = settings.sampler.max_logprobs
        self.recorded = min(USUAL if limit == UNLIMITED else limit, vocab_size)
        self.processed = settings.sampler.logprobs_mode == "processed"
        return Column("logprobs", torch.int32, default=NOTHING), Column("prompt_logprobs", torch.int32, default=NOTHING)

    def check(self, request: Request, settings: RunnerSettings) -> None:
        limit = settings.sampler.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(request.params, name)
            if wanted is not None and limit != UNLIMITED and (wanted == UNLIMITED or wanted > limit):
                got = "-1 (the whole vocabulary)" if wanted == UNLIMITED else wanted
                raise RequestError(f"{name}: got {got}; accepted: at most {limit} (setting sampler.max_logprobs; -1 there sets no limit)")

    def row_values(self, request: Request) -> Mapping[str, int]:
        given = {name: getattr(request.params, name) for name in ("logprobs", "prompt_logprobs")}
        return {name: self.recorded if self._exceeds(wanted) else wanted for name, wanted in given.items() if wanted is not None}

    def features(self, params: SamplingParams) -> Feature:
        found = Feature.GREEDY
        if params.logprobs is not None:
            found |= Feature.LOGPROBS
            if self._exceeds(params.logprobs):
                found |= Feature.ALL_LOGPROBS
        if params.prompt_logprobs is not None:
            found |= Feature.PROMPT_LOGPROBS
            if self._exceeds(params.prompt_logprobs):
                found |= Feature.ALL_PROMPT_LOGPROBS
        return found

    def _exceeds(self, wanted: int) -> bool:
        return wanted == UNLIMITED or wanted > self.recorded
