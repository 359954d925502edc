"""A logits processor for tests. Importable by name from an engine process, as plugin objects must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from modelrunner import LogitsProcessor, hookimpl
from modelrunner.batch import Batch
from modelrunner.request_table import Column


class Shift(LogitsProcessor):
    """Adds the request's own number to one id, and notes what it was given."""

    def __init__(self, name: str = "shift", token: int = 50) -> None:
        self.name = name
        self.token = token
        self.seen: list[tuple[int, torch.Tensor]] = []

    def columns(self, settings: Any) -> Sequence[Column]:
        return (Column(f"{self.name}.by", torch.float32),)

    def row_values(self, request: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return {f"{self.name}.by": float(arguments["by"])}

    def apply(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        self.seen.append((batch.num_rows, logits.clone()))
        logits[:, self.token] += batch.per_row(f"{self.name}.by")
        return logits


class Plugin:
    def __init__(self, *processors: Any) -> None:
        self.processors = processors

    @hookimpl
    def logits_processors(self, register: Any) -> None:
        for processor in self.processors:
            register(processor)
