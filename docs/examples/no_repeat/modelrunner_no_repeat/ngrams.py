"""The processor. N rows of a step, L tokens of the longest request, V vocabulary size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from modelrunner.batch import Batch
from modelrunner.logits_processors import LogitsProcessor
from modelrunner.request import Request
from modelrunner.request_table import Column
from modelrunner.settings import RunnerSettings


class NoRepeat(LogitsProcessor):
    """Bans each token that stood, earlier in the request, after the `size` - 1 tokens that the request ends with now."""

    name = "no_repeat"
    drafts = True  # what is banned follows from the known tokens

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size

    def columns(self, settings: RunnerSettings) -> Sequence[Column]:
        return (Column("no_repeat.size", torch.int32),)

    def row_values(self, request: Request, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        size = arguments.get("size")
        if set(arguments) != {"size"} or isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= self.max_size:
            raise ValueError(f"got {dict(arguments)}; accepted: {{'size': n}}, n from 1 to {self.max_size} (plugin.no_repeat.max_size)")
        return {"no_repeat.size": size}

    def apply(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        size = batch.per_row("no_repeat.size").unsqueeze(1)  # [N, 1]; 0 for rows that do not ask
        ids = batch.per_row("token_ids").long()  # [N, L]; nobody has written those from `known` on
        newest = self.last_tokens(batch, self.max_size)  # [N, max_size]
        place = torch.arange(ids.shape[1], device=ids.device)
        banned = (size > 0) & (place >= size - 1) & (place < batch.per_row("known").unsqueeze(1))
        for back in range(1, self.max_size):
            before = ids.roll(back, 1)  # the tokens `back` places before each; those that wrap around stand before place `size` - 1
            banned &= (back >= size) | (before == newest[:, -back].unsqueeze(1))
        limit = torch.where(banned, -torch.inf, torch.inf)
        return logits.scatter_reduce_(1, torch.where(banned, ids, 0), limit, "amin")
