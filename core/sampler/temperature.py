"""Temperature: how far from greedy a row samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from modelrunner.batch import Feature
from modelrunner.kernels.sampling.reference import GREEDY_TEMPERATURE
from modelrunner.request_table import Column
from modelrunner.sampler.base import Stage

if TYPE_CHECKING:
    from modelrunner.request import Request, SamplingParams
    from modelrunner.settings import RunnerSettings


class Temperature(Stage):
    """Divides the logits. Temperatures up to the `sample` operation's GREEDY_TEMPERATURE are greedy: there a sampled token would differ
    from the best one only on a tie."""

    inputs = ("temperature",)

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        return (Column("temperature", torch.float32),)

    def row_values(self, request: Request) -> Mapping[str, float]:
        return {"temperature": request.params.temperature}

    def features(self, params: SamplingParams) -> Feature:
        return Feature.GREEDY if params.temperature <= GREEDY_TEMPERATURE else Feature.PLAIN
