"""The ModelState of Gemma 3 text models (Gemma Team 2025, arXiv:2503.19786)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from modelrunner.attention import BoundAttention
from modelrunner.batch import Batch
from modelrunner.checkpoint import ModelCard
from modelrunner.model_state import BuildContext, ModelState, Needs, No, Tap, Yes
from modelrunner.model_states.gemma3.config import Gemma3Config, gemma3_config
from modelrunner.model_states.gemma3.layers import Gemma3Model, cache_groups
from modelrunner.model_states.gemma3.weights import gemma3_weight_map
from modelrunner.settings import RunnerSettings
from modelrunner.weights import WeightMap

FEATURES = ("prefix_cache", "chunked_prefill", "speculation", "prompt_logprobs", "graphs", "taps", "deterministic", "prompt_embeds")


class Gemma3State(ModelState):
    """Layers with a sliding window form the cache group `sliding`, the others `full`; each group has rotary positions of its own.

    Tap points: `layer.i`, the residual stream [T, H] that enters layer i; the last one leaves the last layer, before the final norm.
    """

    module: Gemma3Model

    def __init__(self, card: ModelCard, settings: RunnerSettings) -> None:
        super().__init__(card, settings)
        self.config: Gemma3Config = gemma3_config(card)

    def declare(self, card: ModelCard, settings: RunnerSettings) -> Needs:
        return Needs(
            cache_groups=cache_groups(self.config),
            hidden_size=self.config.hidden_size,
            vocab_size=self.config.vocab_size,
            max_model_len=self.config.max_length,
            tap_points=tuple(f"layer.{layer}" for layer in range(self.config.num_layers + 1)),
        )

    def supports(self, feature: str) -> Yes | No:
        return Yes() if feature in FEATURES else No(f"Gemma 3 models know nothing of {feature!r}")

    def weight_map(self, card: ModelCard) -> WeightMap:
        return gemma3_weight_map(card, self.config)

    def build(self, ctx: BuildContext) -> Gemma3Model:
        if ctx.shard.size != 1:
            raise ValueError(f"Gemma 3 models run on one device; a shard of {ctx.shard.size} was asked for")
        return Gemma3Model(ctx, self.config, min(self.settings.model.max_model_len or self.config.max_length, self.config.max_length))

    def embed(self, batch: Batch, out: torch.Tensor) -> None:
        self.module.embed(batch.input_ids, out)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: Mapping[str, BoundAttention],
        caches: Mapping[str, torch.Tensor],
        tap: Tap,
    ) -> torch.Tensor:
        return cast(torch.Tensor, self.module(hidden, positions, attention, tap))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.module.logits(hidden)
