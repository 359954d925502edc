"""The draw: which stream of random numbers a row reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from modelrunner.request_table import Column
from modelrunner.sampler.base import Stage

if TYPE_CHECKING:
    from modelrunner.request import Request
    from modelrunner.settings import RunnerSettings


class Draw(Stage):
    """Gumbel-max with a counter-based generator: noise is a function of seed, choice, position and vocabulary id, and of nothing else.

    seed: 64 bits; the host draws one for a request that gave none. choice: which of the request's parallel answers, from 0.
    """

    inputs = ("seed", "choice")

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        return (Column("seed", torch.int64), Column("choice", torch.int32))

    def row_values(self, request: Request) -> Mapping[str, int]:
        return {"seed": request.seed, "choice": request.choice}
