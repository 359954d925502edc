"""Listening to a ModelState inside a running engine: its logits at every position, what it touches, which taps it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from modelrunner.batch import Batch
    from modelrunner.engine import Engine

Tap = Callable[[str, torch.Tensor], torch.Tensor]


class StepTrace:
    """Wraps `embed` and `forward` of an engine's ModelState. For devices that run work at once.

    logits: request id -> position -> [vocabulary] float32, for every query token computed. dtypes: of the logits. hidden: shapes of what
    `forward` got and returned. tap: stands in for the core's.
    """

    def __init__(self, engine: Engine, tap: Tap | None = None) -> None:
        self.engine = engine
        self.state = engine.assembly.state
        self.logits: dict[str, dict[int, torch.Tensor]] = {}
        self.dtypes: set[torch.dtype] = set()
        self.shapes: set[tuple[torch.Size, torch.Size]] = set()
        self.tap = tap
        self._batch: Batch | None = None
        self._positions = torch.empty(0)
        self._embed, self._forward = self.state.embed, self.state.forward
        setattr(self.state, "embed", self._listen_embed)  # noqa: B010  (an instance's method, which mypy forbids to assign)
        setattr(self.state, "forward", self._listen_forward)  # noqa: B010

    def _listen_embed(self, batch: Batch, out: torch.Tensor) -> None:
        self._batch, self._positions = batch, batch.positions.clone()
        self._embed(batch, out)

    def _listen_forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, attention: Any, caches: Any, tap: Tap, **media: Any
    ) -> torch.Tensor:
        batch = self._batch
        assert batch is not None, "forward was called before embed"
        out = self._forward(hidden, positions, attention, caches, self.tap or tap, **media)
        self.shapes.add((hidden.shape, out.shape))
        logits = self.state.logits(out)
        self.dtypes.add(logits.dtype)
        owners = {request.row: name for name, request in self.engine.requests.items()}
        rows = batch.rows[batch.token_row]
        for token in batch.token_valid.nonzero().flatten().tolist():
            of_request = self.logits.setdefault(owners[int(rows[token])], {})
            of_request[int(self._positions[token])] = logits[token].float().clone()
        return out
