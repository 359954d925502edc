"""Allow lists: the only ids that a request may sample. Those of structured output change from token to token (see `guides`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from modelrunner.batch import Feature, Int32Array
from modelrunner.kernels.logits.reference import BITS
from modelrunner.request_table import Column
from modelrunner.sampler.edits import EditStage, seats_for

if TYPE_CHECKING:
    from modelrunner.request import Request, SamplingParams
    from modelrunner.settings import RunnerSettings


class Allowed(EditStage):
    """`allowed_token_ids` as a bitmask of the vocabulary in a seat, so that a list may be as long as it likes. A guide's mask has its list
    in it already."""

    feature = Feature.ALLOWED
    argument = "allowed"
    tensors = ("allowed_ids", "allowed_ids.seats")

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        seats = seats_for(settings.sampler.allow_list_seats, settings.scheduler.max_rows)
        return (Column("allowed_ids", torch.int32, max(2, -(-vocab_size // BITS)), seats=seats),)

    def row_values(self, request: Request) -> Mapping[str, Int32Array]:
        if request.guide is not None:
            return {"allowed_ids": request.guide.mask}  # as it is when the row is given out
        ids = request.params.allowed_token_ids
        return {} if ids is None else {"allowed_ids": bitmask(ids)}

    def features(self, params: SamplingParams) -> Feature:
        return Feature.GREEDY if params.allowed_token_ids is None and params.structured_outputs is None else self.feature


def bitmask(ids: Sequence[int], words: int | None = None) -> Int32Array:
    """[words] of which bit v % 32 of word v // 32 is set for each id v. words: None for as many as the highest id needs."""
    bits = np.zeros((max(ids) // BITS + 1 if words is None else words) * BITS, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
