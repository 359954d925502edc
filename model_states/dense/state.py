"""The dense ModelState: Llama, SmolLM2, Mistral, Phi-3, Qwen2, MiMo, Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from modelrunner.attention import BoundAttention
from modelrunner.batch import Batch
from modelrunner.checkpoint import ModelCard
from modelrunner.model_state import BuildContext, ModelState, Needs, No, Tap, Yes
from modelrunner.model_states.dense.config import DenseConfig, dense_config
from modelrunner.model_states.dense.layers import DenseModel, cache_groups
from modelrunner.model_states.dense.weights import dense_weight_map
from modelrunner.settings import RunnerSettings
from modelrunner.weights import WeightMap


class DenseState(ModelState):
    """A decoder of attention and gated MLPs. Layers with a sliding window form the cache group `sliding`, the others `full`.

    Tap points: `layer.i`, the residual stream [T, H] that enters layer i; the last one leaves the last layer, before the final norm.
    """

    module: DenseModel
    narrows = True

    def __init__(self, card: ModelCard, settings: RunnerSettings) -> None:
        super().__init__(card, settings)
        self.config: DenseConfig = dense_config(card)

    @property
    def table_length(self) -> int:
        """Positions of the rotary table: no more than a request can have."""
        return min(self.settings.model.max_model_len or self.config.rope.max_length, self.config.rope.max_length)

    def declare(self, card: ModelCard, settings: RunnerSettings) -> Needs:
        return Needs(
            cache_groups=cache_groups(self.config),
            hidden_size=self.config.hidden_size,
            vocab_size=self.config.vocab_size,
            max_model_len=self.config.rope.max_length,
            tap_points=tuple(f"layer.{layer}" for layer in range(self.config.num_layers + 1)),
        )

    def supports(self, feature: str) -> Yes | No:
        known = ("prefix_cache", "chunked_prefill", "speculation", "prompt_logprobs", "graphs", "taps", "deterministic", "prompt_embeds")
        return Yes() if feature in known else No(f"dense models know nothing of {feature!r}")

    def weight_map(self, card: ModelCard) -> WeightMap:
        return dense_weight_map(card, self.config, self.table_length)

    def build(self, ctx: BuildContext) -> DenseModel:
        if ctx.shard.size != 1:
            raise ValueError(f"dense models run on one device; a shard of {ctx.shard.size} was asked for")
        return DenseModel(ctx, self.config, self.table_length)

    def embed(self, batch: Batch, out: torch.Tensor) -> None:
        self.module.embed(batch.input_ids, out)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: Mapping[str, BoundAttention],
        caches: Mapping[str, torch.Tensor],
        tap: Tap,
        *,
        sampled: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return cast(torch.Tensor, self.module(hidden, positions, attention, tap, sampled))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.module.head(hidden))
