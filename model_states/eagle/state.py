"""The EAGLE drafter: a head that predicts the target's next feature (Li et al. 2024, arXiv:2401.15077)."""

from __future__ import annotations

from functools import cached_property

import torch

from modelrunner.model_states.common.draft_layers import draft_groups
from modelrunner.model_states.common.drafting import FeatureDrafter
from modelrunner.model_states.eagle.config import EagleConfig, eagle_config
from modelrunner.model_states.eagle.layers import EagleModel
from modelrunner.model_states.eagle.weights import eagle_weight_map
from modelrunner.speculation import DraftBuild, DrafterNeeds, DraftStep
from modelrunner.weights import WeightMap


class EagleDrafter(FeatureDrafter):
    """Reads the target's last hidden state; its output goes to the target's head, and comes back as the next feature."""

    module: EagleModel

    @cached_property
    def config(self) -> EagleConfig:
        return eagle_config(self.source, self.names)

    def declare(self) -> DrafterNeeds:
        layer = self.config.layer
        self.same_hidden_size(layer.hidden_size)
        self.same_vocabulary(layer.vocab_size)
        return DrafterNeeds(cache_groups=draft_groups(layer), hidden=True, max_model_len=layer.rope.max_length, shifted=True)

    def build(self, build: DraftBuild) -> EagleModel:
        length = min(self.config.layer.rope.max_length, self.target.max_model_len)
        module = EagleModel(build.context, self.config, length)
        self.share(build, module.embed)
        return module

    def weight_map(self) -> WeightMap:
        return eagle_weight_map(self.config)

    def first_features(self, step: DraftStep) -> torch.Tensor:
        assert step.hidden is not None, "declared as `hidden`"
        return step.hidden

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        head = self.module.head
        return self.target_state.logits(features) if head is None else head(features)
