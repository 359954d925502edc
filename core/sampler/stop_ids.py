"""Stop ids: tokens that end a row, decided on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from modelrunner.batch import Int32Array
from modelrunner.errors import RequestError
from modelrunner.request_table import Column
from modelrunner.sampler.base import Stage

if TYPE_CHECKING:
    from modelrunner.request import Request
    from modelrunner.settings import RunnerSettings

PADDING = -1  # no token id


class StopIds(Stage):
    """A seated list: `stop_token_ids` and, unless `ignore_eos`, the model's end-of-sequence ids. The state update reads it."""

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        seats = settings.sampler.stop_seats
        width = settings.sampler.max_stop_token_ids
        return (Column("stop_ids", torch.int32, width, PADDING, seats=settings.scheduler.max_rows if seats is None else seats),)

    def check(self, request: Request, settings: RunnerSettings) -> None:
        found, limit = len(request.stop_ids), settings.sampler.max_stop_token_ids
        if found > limit:
            raise RequestError(
                f"stop_token_ids: got {found} ids, end-of-sequence ids included; accepted: at most {limit} "
                "(setting sampler.max_stop_token_ids)"
            )

    def row_values(self, request: Request) -> Mapping[str, Int32Array]:
        return {"stop_ids": np.array(request.stop_ids, np.int32)} if request.stop_ids else {}
