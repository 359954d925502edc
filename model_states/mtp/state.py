"""The drafter that uses a target's module for multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2)."""

from __future__ import annotations

from functools import cached_property

import torch

from modelrunner.checkpoint import ModelCard
from modelrunner.model_states.common.draft_layers import draft_groups
from modelrunner.model_states.common.drafting import FeatureDrafter
from modelrunner.model_states.mtp.config import MTPConfig, mtp_config
from modelrunner.model_states.mtp.layers import MTPModel
from modelrunner.model_states.mtp.weights import mtp_weight_map
from modelrunner.speculation import DraftBuild, DrafterNeeds, DraftStep
from modelrunner.weights import WeightMap


class MTPDrafter(FeatureDrafter):
    """One decoder layer, trained with the target, whose embedding and head it uses. For more than one draft the module is applied again, to
    what it gave."""

    module: MTPModel

    @property
    def source(self) -> ModelCard:
        """The drafter's own checkpoint, or else the target's, in which such modules are published."""
        return self.card or self.target.card

    @cached_property
    def config(self) -> MTPConfig:
        return mtp_config(self.source, self.names)

    def declare(self) -> DrafterNeeds:
        layer = self.config.layer
        self.same_hidden_size(layer.hidden_size)
        self.same_vocabulary(layer.vocab_size)
        return DrafterNeeds(cache_groups=draft_groups(layer), hidden=True, max_model_len=layer.rope.max_length, shifted=True)

    def build(self, build: DraftBuild) -> MTPModel:
        length = min(self.config.layer.rope.max_length, self.target.max_model_len)
        self.share(build, None)
        return MTPModel(build.context, self.config, length)

    def weight_map(self) -> WeightMap:
        return mtp_weight_map(self.config)

    def first_features(self, step: DraftStep) -> torch.Tensor:
        assert step.hidden is not None, "declared as `hidden`"
        return step.hidden
