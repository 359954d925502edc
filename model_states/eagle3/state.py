"""The EAGLE-3 drafter: a head on hidden states of three of the target's layers (Li et al. 2025, arXiv:2503.01840)."""

from __future__ import annotations

from functools import cached_property

import torch

from modelrunner.model_states.common.draft_layers import draft_groups
from modelrunner.model_states.common.drafting import FeatureDrafter
from modelrunner.model_states.eagle3.config import Eagle3Config, eagle3_config
from modelrunner.model_states.eagle3.layers import Eagle3Model
from modelrunner.model_states.eagle3.weights import eagle3_weight_map
from modelrunner.speculation import DraftBuild, DrafterNeeds, DraftStep
from modelrunner.weights import WeightMap


class Eagle3Drafter(FeatureDrafter):
    """Fuses the residual streams that enter three layers of the target (tap points `layer.i`); predicts ids of a vocabulary of its own."""

    module: Eagle3Model

    @cached_property
    def config(self) -> Eagle3Config:
        target = {**self.target.card.config, "vocab_size": self.target.vocab_size, "hidden_size": self.target.hidden_size}
        return eagle3_config(self.source, self.names, target)

    @property
    def points(self) -> tuple[str, ...]:
        """Tap points of the fused layers, in the order in which `fc` reads them."""
        return tuple(f"layer.{layer}" for layer in self.config.layer_ids)

    def declare(self) -> DrafterNeeds:
        config = self.config
        if absent := sorted(set(self.points) - set(self.target.tap_points)):
            raise ValueError(
                f"drafter {self.source.name} reads the target's tap points {', '.join(self.points)}; it lacks {', '.join(absent)}"
            )
        if not (config.own_embedding and config.own_head):  # what is the target's must fit
            self.same_hidden_size(config.layer.hidden_size)
        return DrafterNeeds(
            cache_groups=draft_groups(config.layer),
            tap_points=tuple(dict.fromkeys(self.points)),
            max_model_len=config.layer.rope.max_length,
            shifted=True,
        )

    def build(self, build: DraftBuild) -> Eagle3Model:
        length = min(self.config.layer.rope.max_length, self.target.max_model_len)
        module = Eagle3Model(build.context, self.config, length)
        self.share(build, module.embed)
        return module

    def weight_map(self) -> WeightMap:
        return eagle3_weight_map(self.config)

    def first_features(self, step: DraftStep) -> torch.Tensor:
        return self.module.fuse(torch.cat([step.taps[point] for point in self.points], -1))

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        head, normed = self.module.head, self.module.norm(features)
        return self.target_state.logits(normed) if head is None else head(normed)

    def target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return self.module.target_ids(ids)
