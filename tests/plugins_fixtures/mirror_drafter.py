"""A drafter with a cache: the target itself, run over each step once more with cache groups of its own. All that it proposes is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from modelrunner import Offer, hookimpl
from modelrunner.batch import Batch
from modelrunner.speculation import DraftBuild, Drafter, DrafterNeeds, DraftStep

PREFIX = "draft."


class MirrorDrafter(Drafter):
    """seen: positions of the tokens that it read, and how many places it proposed at, by row of the table."""

    holds: int | None = None

    def declare(self) -> DrafterNeeds:
        state = self.target.state_for(self.target.card)(self.target.card, self.settings)
        groups = state.declare(self.target.card, self.settings).cache_groups
        return DrafterNeeds(tuple(replace(group, name=PREFIX + group.name) for group in groups), max_model_len=self.holds)

    def build(self, build: DraftBuild) -> None:
        self.state = build.target

    def _run(self, batch: Batch, attention: Mapping[str, Any], caches: Mapping[str, torch.Tensor]) -> torch.Tensor:
        def own(found: Mapping[str, Any]) -> dict[str, Any]:
            return {name.removeprefix(PREFIX): value for name, value in found.items()}

        module: Any = self.state.module
        weight = next(module.parameters())
        hidden = torch.zeros(batch.num_tokens, self.target.hidden_size, dtype=weight.dtype, device=weight.device)
        self.state.embed(batch, hidden)
        return self.state.forward(hidden, batch.positions, own(attention), own(caches), lambda point, states: states)

    def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        self._run(step.batch, step.attention, step.caches)
        tokens = step.newest
        for index in range(step.num_draft):
            single = step.next_pass(index)
            hidden = self._run(replace(single.batch, input_ids=tokens), single.attention, step.caches)
            tokens = self.state.logits(hidden).argmax(-1)
            out[:, index] = tokens


class MirrorPlugin:
    """Offers the drafter `mirror`. holds: positions that it says it can hold."""

    MODELRUNNER_API = ">=1.6,<2"

    def __init__(self, holds: int | None = None) -> None:
        self.kind = type("MirrorDrafter", (MirrorDrafter,), {"holds": holds})

    @hookimpl
    def drafter(self) -> Offer[type[Drafter]]:
        return Offer("mirror", lambda: self.kind, reason="for tests")
