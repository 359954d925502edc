"""The ModelState of Idefics3 (Laurençon et al. 2024, arXiv:2408.12637) and SmolVLM (Marafioti et al. 2025, arXiv:2504.05299)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn

from modelrunner.attention import BoundAttention
from modelrunner.batch import Batch
from modelrunner.checkpoint import ModelCard
from modelrunner.media import EncoderInput, MediaBatch, MediaNeeds
from modelrunner.model_state import BuildContext, ModelState, Needs, No, Tap, Yes
from modelrunner.model_states.common.encoders import normalised, starts_of
from modelrunner.model_states.dense.layers import DenseModel, cache_groups
from modelrunner.model_states.idefics3.config import Idefics3Config, idefics3_config
from modelrunner.model_states.idefics3.processor import Idefics3Processor
from modelrunner.model_states.idefics3.vision import VisionTower
from modelrunner.model_states.idefics3.weights import idefics3_weight_map
from modelrunner.settings import RunnerSettings
from modelrunner.text import Tokenizer
from modelrunner.weights import WeightMap

FEATURES = (
    *("prefix_cache", "chunked_prefill", "speculation", "prompt_logprobs", "graphs", "taps", "deterministic"),
    *("multimodal", "prompt_embeds"),
)


class Idefics3Model(nn.Module):
    """`text`, a dense decoder, and `vision`, the tower."""

    def __init__(self, ctx: BuildContext, config: Idefics3Config, max_length: int) -> None:
        super().__init__()
        self.text = DenseModel(ctx, config.text, max_length)
        self.vision = VisionTower(ctx, config.vision, config.text.hidden_size)


class Idefics3State(ModelState):
    """A dense decoder with plain positions, in which images take the place of tokens. Cache groups and tap points: the dense family's."""

    module: Idefics3Model

    def __init__(self, card: ModelCard, settings: RunnerSettings) -> None:
        super().__init__(card, settings)
        self.config: Idefics3Config = idefics3_config(card)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        most = self.config.text.rope.max_length
        return min(self.settings.model.max_model_len or most, most)

    @property
    def max_embeddings(self) -> int:
        """Of one image."""
        return max(self.config.vision.tokens, min(self.config.max_tiles * self.config.vision.tokens, self.longest))

    def declare(self, card: ModelCard, settings: RunnerSettings) -> Needs:
        text = self.config.text
        return Needs(
            cache_groups=cache_groups(text),
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            max_model_len=text.rope.max_length,
            tap_points=tuple(f"layer.{layer}" for layer in range(text.num_layers + 1)),
            media=MediaNeeds(max_embeddings=self.max_embeddings, capture=True),
        )

    def supports(self, feature: str) -> Yes | No:
        return Yes() if feature in FEATURES else No(f"Idefics3 and SmolVLM models know nothing of {feature!r}")

    def weight_map(self, card: ModelCard) -> WeightMap:
        return idefics3_weight_map(self.config)

    def build(self, ctx: BuildContext) -> Idefics3Model:
        if ctx.shard.size != 1:
            raise ValueError(f"Idefics3 and SmolVLM models run on one device; a shard of {ctx.shard.size} was asked for")
        return Idefics3Model(ctx, self.config, self.longest)

    def media_processor(self, tokenizer: Tokenizer | None) -> Idefics3Processor:
        return Idefics3Processor(self.card, self.config, tokenizer, self.max_embeddings)

    def encode(self, items: Sequence[EncoderInput], out: torch.Tensor) -> None:
        pixels = [normalised(item.tensors["pixels"], item.tensors["norm"]).to(out.dtype).flatten(1) for item in items]
        tiles = sum(int(item.info["tiles"]) for item in items)
        lengths = (self.config.vision.patches_across**2,) * tiles
        out.copy_(self.module.vision(torch.cat(pixels), starts_of([item.tensors["lengths"] for item in items]), lengths))

    def embed(self, batch: Batch, out: torch.Tensor) -> None:
        self.module.text.embed(batch.input_ids, out)

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: Mapping[str, BoundAttention],
        caches: Mapping[str, torch.Tensor],
        tap: Tap,
        *,
        media: MediaBatch | None = None,
    ) -> torch.Tensor:
        return cast(torch.Tensor, self.module.text(hidden, positions, attention, tap))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.module.text.head(hidden))
