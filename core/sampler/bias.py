"""Bias: numbers added to the logits of some ids."""

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


class Bias(EditStage):
    """`logit_bias` as a seated list: ids, then the bits of the numbers."""

    feature = Feature.BIASED
    argument = "bias"
    tensors = ("logit_bias", "logit_bias.seats")

    def __init__(self) -> None:
        self._width = 0

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        self._width = settings.sampler.max_logit_bias
        seats = seats_for(settings.sampler.logit_bias_seats, settings.scheduler.max_rows)
        return (Column("logit_bias", torch.int32, 2 * self._width, NO_ID, seats=seats),)

    def check(self, request: Request, settings: RunnerSettings) -> None:
        found, limit = len(request.params.logit_bias or ()), settings.sampler.max_logit_bias
        if found > limit:
            raise RequestError(f"logit_bias: got {found} ids; accepted: at most {limit} (setting sampler.max_logit_bias)")

    def row_values(self, request: Request) -> Mapping[str, Int32Array]:
        bias = request.params.logit_bias
        if not bias:
            return {}
        line = np.full(2 * self._width, NO_ID, np.int32)
        line[: len(bias)] = list(bias)
        line[self._width : self._width + len(bias)] = np.array(list(bias.values()), np.float32).view(np.int32)
        return {"logit_bias": line}

    def features(self, params: SamplingParams) -> Feature:
        return self.feature if params.logit_bias else Feature.GREEDY
