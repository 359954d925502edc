"""Bad words: sequences of ids that the output may not hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from modelrunner.batch import Feature, Int32Array
from modelrunner.errors import RequestError
from modelrunner.request_table import Column
from modelrunner.sampler.edits import EditStage, seats_for

if TYPE_CHECKING:
    from modelrunner.request import Request, SamplingParams
    from modelrunner.settings import RunnerSettings

NO_ID = -1


class BadWords(EditStage):
    """Every tokenisation of `bad_words`, with and without a leading space, at the end of its line of a seated matrix. The last id of one is
    banned where the output ends with the ids before it."""

    feature = Feature.BANNED
    argument = "bad_words"
    tensors = ("bad_words", "bad_words.seats")

    def __init__(self) -> None:
        self._longest = 0

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        self._longest = settings.sampler.max_bad_word_tokens
        seats = seats_for(settings.sampler.bad_word_seats, settings.scheduler.max_rows)
        return (Column("bad_words", torch.int32, settings.sampler.max_bad_words * self._longest, NO_ID, seats=seats),)

    def check(self, request: Request, settings: RunnerSettings) -> None:
        found, limit = len(request.bad_word_ids), settings.sampler.max_bad_words
        if found > limit:
            raise RequestError(
                f"bad_words: got {found} sequences of tokens (a word counts twice where a leading space changes it); accepted: at most "
                f"{limit} (setting sampler.max_bad_words)"
            )
        longest = max(map(len, request.bad_word_ids), default=0)
        if longest > self._longest:
            raise RequestError(
                f"bad_words: a word has {longest} tokens; accepted: at most {self._longest} (setting sampler.max_bad_word_tokens)"
            )

    def row_values(self, request: Request) -> Mapping[str, Int32Array]:
        if not request.bad_word_ids:
            return {}
        lines = np.full((len(request.bad_word_ids), self._longest), NO_ID, np.int32)
        for line, ids in zip(lines, request.bad_word_ids, strict=True):
            line[-len(ids) :] = ids
        return {"bad_words": lines.reshape(-1)}

    def features(self, params: SamplingParams) -> Feature:
        return self.feature if params.bad_words else Feature.GREEDY

    def given(self, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return columns["bad_words"], columns["bad_words.seats"].unflatten(1, (-1, self._longest))
