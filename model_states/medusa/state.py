"""The Medusa drafter: heads that each predict one of the next tokens, all in one pass (Cai et al. 2024, arXiv:2401.10774)."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import nn

from modelrunner.model_states.common.drafting import tensor_names
from modelrunner.model_states.medusa.config import MedusaConfig, medusa_config
from modelrunner.model_states.medusa.layers import MedusaModel
from modelrunner.model_states.medusa.weights import medusa_weight_map
from modelrunner.speculation import DraftBuild, Drafter, DrafterNeeds, DraftStep
from modelrunner.weights import WeightMap


class MedusaDrafter(Drafter):
    """Reads the target's hidden state at the last place that counts; has no cache and no passes of its own."""

    module: MedusaModel

    @cached_property
    def config(self) -> MedusaConfig:
        if self.card is None:
            raise ValueError("MedusaDrafter needs weights: name their folder or hub id in speculation.model")
        target = {"hidden_size": self.target.hidden_size, "vocab_size": self.target.vocab_size}
        return medusa_config(self.card, tensor_names(self.card), target)

    def declare(self) -> DrafterNeeds:
        return DrafterNeeds(hidden=True, max_tokens=self.config.num_heads)

    def build(self, build: DraftBuild) -> nn.Module:
        return MedusaModel(build.context, self.config)

    def weight_map(self) -> WeightMap:
        return medusa_weight_map(self.config)

    def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        assert step.hidden is not None, "declared as `hidden`"
        hidden = step.hidden.index_select(0, step.last_place)
        for place, head in enumerate(self.module.stack[: step.num_draft]):
            out[:, place].copy_(head(hidden).argmax(-1))
