"""Min-p: drop tokens far less likely than the best one (Nguyen et al. 2024, arXiv:2407.01082)."""

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


class MinP(Stage):
    """Keeps tokens with at least `min_p` of the best token's probability, after temperature. 0: all."""

    inputs = ("min_p",)
    feature = Feature.FILTERED

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        return (Column("min_p", torch.float32, default=0.0),)

    def row_values(self, request: Request) -> Mapping[str, float]:
        return {"min_p": request.params.min_p}

    def features(self, params: SamplingParams) -> Feature:
        return Feature.FILTERED if params.min_p > 0.0 and params.temperature > GREEDY_TEMPERATURE else Feature.GREEDY
