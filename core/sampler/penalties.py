"""Penalties for tokens that the prompt or the output has already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from modelrunner.batch import Feature
from modelrunner.request_table import Column
from modelrunner.sampler.edits import EditStage

if TYPE_CHECKING:
    from modelrunner.request import Request, SamplingParams
    from modelrunner.settings import RunnerSettings

COUNT_BYTES = 4  # for each token of the vocabulary
DEFAULT_BYTES = 128 << 20  # for all seats, where the setting leaves their number open


class Penalties(EditStage):
    """Repetition (Keskar et al. 2019, arXiv:1909.05858), presence and frequency penalties.

    A row that asks holds a seat: a count word for each token of the vocabulary, kept on the device. `counted` says how many of the row's
    tokens the seat has seen; the rest is counted before the logits change, so that a step in flight, a preemption or a reused seat need no
    word from the host.
    """

    feature = Feature.PENALISED
    argument = "penalties"
    tensors = ("token_counts", "token_counts.seats", "repetition_penalty", "presence_penalty", "frequency_penalty")

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        seats = settings.sampler.penalty_seats
        if seats is None:
            seats = min(settings.scheduler.max_rows, max(1, DEFAULT_BYTES // (COUNT_BYTES * vocab_size)))
        return (
            Column("prompt_len", torch.int32),
            Column("counted", torch.int32),
            Column("repetition_penalty", torch.float32, default=1.0),
            Column("presence_penalty", torch.float32),
            Column("frequency_penalty", torch.float32),
            Column("token_counts", torch.int32, max(2, vocab_size), seats=seats, on_device=True),
        )

    def row_values(self, request: Request) -> Mapping[str, Any]:
        values: dict[str, Any] = {"prompt_len": len(request.prompt_token_ids)}
        if self.features(request.params):
            values |= {name: getattr(request.params, name) for name in self.tensors[2:]}
            values["token_counts"] = np.zeros(1, np.int32)  # a seat
        return values

    def features(self, params: SamplingParams) -> Feature:
        neutral = params.repetition_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0
        return Feature.GREEDY if neutral else self.feature
