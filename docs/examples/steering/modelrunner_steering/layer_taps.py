"""The two taps. T tokens of a step, N rows, H hidden size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from modelrunner.batch import Batch
from modelrunner.request import Request
from modelrunner.request_table import Column
from modelrunner.settings import RunnerSettings
from modelrunner.taps import Result, Tap


class Steer(Tap):
    """Adds the request's vector to the hidden states at `point`. The vector takes a seat, so few lines of H numbers serve many rows."""

    name = "steer"

    def __init__(self, point: str, hidden_size: int, seats: int) -> None:
        self.points = (point,)
        self.hidden_size = hidden_size
        self.seats = seats

    def columns(self, settings: RunnerSettings) -> Sequence[Column]:
        return (Column("steer.vector", torch.float32, width=self.hidden_size, seats=self.seats),)

    def row_values(self, request: Request) -> Mapping[str, Any] | None:
        given = request.params.extra_args.get(self.name)
        if given is None:
            return None
        vector = np.asarray(given, np.float32)
        if vector.shape != (self.hidden_size,) or not np.isfinite(vector).all():
            raise ValueError(f"got an array of shape {list(vector.shape)}; accepted: {self.hidden_size} finite numbers")
        return {"steer.vector": vector}

    def apply(self, point: str, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        return hidden + self.per_token(batch, "steer.vector").to(hidden.dtype)  # rows without a seat read zeros


class ReadHidden(Tap):
    """Reports the hidden state at `point` of the token from which each output token was sampled."""

    name = "hidden"
    edits = False

    def __init__(self, point: str, hidden_size: int) -> None:
        self.points = (point,)
        self.results = (Result("hidden", (hidden_size,), torch.float32),)

    def apply(self, point: str, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        self.sampled = hidden.index_select(0, batch.sample_index).float()
        return hidden

    def outputs(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        return {"hidden": self.sampled}
