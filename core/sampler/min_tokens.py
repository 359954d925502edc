"""Minimum length: no stop id before so many output tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from modelrunner.batch import Feature
from modelrunner.request_table import Column
from modelrunner.sampler.edits import EditStage

if TYPE_CHECKING:
    from modelrunner.request import Request, SamplingParams
    from modelrunner.settings import RunnerSettings


class MinTokens(EditStage):
    """While the output is shorter than `min_tokens`, the ids that would end it (see `StopIds`) cannot be sampled."""

    feature = Feature.KEPT_GOING
    argument = "stops"
    tensors = ("stop_ids", "stop_ids.seats", "min_total")

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        return (Column("min_total", torch.int32),)

    def row_values(self, request: Request) -> Mapping[str, int]:
        if not request.params.min_tokens:
            return {}
        return {"min_total": min(len(request.prompt_token_ids) + request.params.min_tokens, request.limit)}

    def features(self, params: SamplingParams) -> Feature:
        return self.feature if params.min_tokens else Feature.GREEDY
