"""Top-p: keep the nucleus (Holtzman et al. 2019, arXiv:1904.09751, section 3.1)."""

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


class TopP(Stage):
    """Keeps the fewest best tokens that hold `top_p` of the probability that min-p and top-k left, and all that tie with the last of them.
    1: all.
    """

    inputs = ("top_p",)
    feature = Feature.FILTERED

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        return (Column("top_p", torch.float32, default=1.0),)

    def row_values(self, request: Request) -> Mapping[str, float]:
        return {"top_p": request.params.top_p}

    def features(self, params: SamplingParams) -> Feature:
        return Feature.FILTERED if params.top_p < 1.0 and params.temperature > GREEDY_TEMPERATURE else Feature.GREEDY
