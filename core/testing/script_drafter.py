"""A drafter that proposes what a test tells it to, so that acceptance is exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Offer
from modelrunner.request import Request
from modelrunner.request_table import Column
from modelrunner.speculation import DraftBuild, Drafter, DrafterNeeds, DraftStep

DRAFTER_NAME = "script"
IDS, TURN = "script.ids", "script.turn"

DraftScript = Callable[[Request], Sequence[int]]
"""What is proposed for each place of a request's output, from its first token on; -1, and places after the end: nothing."""


class ScriptDrafter(Drafter):
    """Proposes `script(request)`, place by place. script, turns: set by the plugin's subclass."""

    script: DraftScript
    turns: tuple[int, ...]

    def declare(self) -> DrafterNeeds:
        width = self.target.max_model_len + self.settings.speculation.num_tokens
        return DrafterNeeds(columns=(Column(IDS, torch.int32, width=max(2, width), default=-1), Column(TURN, torch.int32)))

    def build(self, build: DraftBuild) -> None:
        self.most = torch.tensor(self.turns or (1 << 20,), dtype=torch.int32, device=build.context.device)

    def row_values(self, request: Request) -> Mapping[str, Any]:
        ids = np.full(self.target.max_model_len + self.settings.speculation.num_tokens, -1, np.int32)
        wanted = np.asarray(type(self).script(request), np.int32)[: ids.size - len(request.prompt_token_ids)]
        ids[len(request.prompt_token_ids) :][: wanted.size] = wanted
        return {IDS: ids}

    def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        row, ahead = step.batch.rows.long(), torch.arange(step.num_draft, device=out.device)
        ids, turn = step.columns[IDS], step.columns[TURN]
        place = (step.known.unsqueeze(1) + ahead).clamp(max=ids.shape[1] - 1)
        most = self.most[turn[row].long() % self.most.shape[0]]
        out.copy_(torch.where(ahead < most.unsqueeze(1), ids[row.unsqueeze(1), place], -1))
        turn.index_add_(0, row, step.wants.to(turn.dtype))


class ScriptDrafterPlugin:
    """Offers the drafter `script`. turns: most drafts after a request's first, second, ... step that brings a token, over and over."""

    MODELRUNNER_API = ">=1.6,<2"

    def __init__(self, script: DraftScript, turns: Sequence[int] = ()) -> None:
        self.kind = type("ScriptDrafter", (ScriptDrafter,), {"script": staticmethod(script), "turns": tuple(turns)})

    @hookimpl
    def drafter(self) -> Offer[type[Drafter]]:
        return Offer(DRAFTER_NAME, lambda: self.kind, reason="drafts given by a test")
