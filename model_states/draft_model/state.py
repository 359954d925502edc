"""The drafter that is a whole, smaller model with the target's vocabulary (Leviathan et al. 2023, arXiv:2211.17192)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from modelrunner.attention import BoundAttention
from modelrunner.batch import Batch
from modelrunner.checkpoint import ModelCard
from modelrunner.model_state import FullAttention, ModelState, Needs, No, Yes
from modelrunner.model_states.common.card import called
from modelrunner.model_states.common.draft_layers import PREFIX
from modelrunner.model_states.draft_model.vocabulary import require_same_ids
from modelrunner.speculation import DraftBuild, Drafter, DrafterNeeds, DraftStep
from modelrunner.weights import WeightMap


class DraftModel(Drafter):
    """Runs the ModelState of another checkpoint: over the target's step first, then on its own tokens.

    Its cache groups are those of the state, under names of their own.
    """

    dtype: torch.dtype  # of activations

    @cached_property
    def own(self) -> ModelCard:
        if self.card is None:
            raise ValueError("a draft model needs weights: name their folder or hub id in speculation.model")
        return self.card

    @cached_property
    def state(self) -> ModelState:
        return self.target.state_for(self.own)(self.own, self.settings)

    @cached_property
    def needs(self) -> Needs:
        """What the draft model declares."""
        return self.state.declare(self.own, self.settings)

    def declare(self) -> DrafterNeeds:
        needs = self.needs
        if needs.vocab_size != self.target.vocab_size:
            raise ValueError(
                f"draft model {self.own.name} has a vocabulary of {needs.vocab_size} ids, target {called(self.target.card)} one of "
                f"{self.target.vocab_size}; they must share one"
            )
        other = [group.name for group in needs.cache_groups if not isinstance(group, FullAttention)]
        if other or needs.columns or needs.buffers:
            raise ValueError(
                f"draft model {self.own.name}: {type(self.state).__name__} has groups that do not attend "
                f"({', '.join(other) or 'none'}), {len(needs.columns)} columns and {len(needs.buffers)} buffers; it may have attention only"
            )
        return DrafterNeeds(
            cache_groups=tuple(replace(group, name=PREFIX + group.name) for group in needs.cache_groups),
            max_model_len=needs.max_model_len,
            capture=needs.capture,
            capture_reason=needs.capture_reason,
        )

    def supports(self, feature: str) -> Yes | No:
        return self.state.supports(feature)

    def build(self, build: DraftBuild) -> nn.Module:
        own = build.own_tokenizer() if build.tokenizer is not None else None
        if build.tokenizer is not None and own is not None:
            require_same_ids(build.tokenizer, own, called(self.target.card), self.own.name)
        self.dtype = build.context.dtype
        self.state.module = self.state.build(build.context).eval()
        return self.state.module

    def weight_map(self) -> WeightMap:
        return self.state.weight_map(self.own)

    def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        self._run(step, step.batch, step.positions, step.attention)
        ids = step.newest
        for number in range(step.num_draft):
            one = step.next_pass(number)
            hidden = self._run(step, replace(one.batch, input_ids=ids), one.batch.positions, one.attention)
            ids = self.state.logits(hidden).argmax(-1)
            out[:, number].copy_(ids)

    def _run(self, step: DraftStep, batch: Batch, positions: torch.Tensor, attention: Mapping[str, BoundAttention]) -> torch.Tensor:
        """Hidden states [T, H] of the tokens of `batch` at `positions` [T], which the caches then hold."""
        state = self.state
        hidden = torch.empty(positions.shape[0], self.needs.hidden_size, dtype=self.dtype, device=positions.device)
        state.embed(batch, hidden)
        return state.forward(hidden, state.positions(batch, positions), own_names(attention), own_names(step.caches), untapped)


def own_names(groups: Mapping[str, Any]) -> dict[str, Any]:
    """By the names that the draft model itself gave its cache groups."""
    return {name.removeprefix(PREFIX): value for name, value in groups.items()}


def untapped(name: str, hidden: torch.Tensor) -> torch.Tensor:
    """The tap of a model that nobody reads or steers."""
    return hidden
