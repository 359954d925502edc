"""Top-k: keep the k best tokens (Fan et al. 2018, arXiv:1805.04833)."""

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


class TopK(Stage):
    """Keeps the k best of what min-p left, and all that tie with the k-th, so that which id survives a tie is never an accident. 0 or -1:
    all.
    """

    inputs = ("top_k",)
    feature = Feature.FILTERED

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        return (Column("top_k", torch.int32, default=0),)

    def row_values(self, request: Request) -> Mapping[str, int]:
        return {"top_k": request.params.top_k}

    def features(self, params: SamplingParams) -> Feature:
        return Feature.FILTERED if params.top_k > 0 and params.temperature > GREEDY_TEMPERATURE else Feature.GREEDY
