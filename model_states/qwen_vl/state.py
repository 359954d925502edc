"""The ModelState of Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923) and Qwen3-VL (arXiv:2511.21631)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from modelrunner.attention import BoundAttention
from modelrunner.batch import Batch
from modelrunner.checkpoint import ModelCard
from modelrunner.media import EncoderInput, MediaBatch, MediaNeeds
from modelrunner.model_state import BuildContext, ModelState, Needs, No, Tap, Yes
from modelrunner.model_states.common.encoders import normalised, starts_of
from modelrunner.model_states.dense.layers import cache_groups
from modelrunner.model_states.qwen_vl.config import QwenVLConfig, qwen_vl_config
from modelrunner.model_states.qwen_vl.layers import QwenVLModel
from modelrunner.model_states.qwen_vl.processor import QwenVLProcessor, image_limits
from modelrunner.model_states.qwen_vl.vision import Layout
from modelrunner.model_states.qwen_vl.weights import qwen_vl_weight_map
from modelrunner.settings import RunnerSettings
from modelrunner.text import Tokenizer
from modelrunner.weights import WeightMap

FEATURES = ("prefix_cache", "chunked_prefill", "speculation", "prompt_logprobs", "graphs", "taps", "deterministic", "multimodal")


class QwenVLState(ModelState):
    """A dense decoder with M-RoPE, and a vision tower. Cache groups and tap points are those of the dense family."""

    module: QwenVLModel

    def __init__(self, card: ModelCard, settings: RunnerSettings) -> None:
        super().__init__(card, settings)
        self.config: QwenVLConfig = qwen_vl_config(card)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, and positions of the rotary table: media take no more positions than tokens."""
        most = self.config.text.rope.max_length
        return min(self.settings.model.max_model_len or most, most)

    @property
    def max_embeddings(self) -> int:
        """Of one item: as many as the largest image has, for a video too."""
        side = self.config.vision.patch_size * self.config.vision.merge
        return max(1, min(image_limits(self.card, self.config)[1] // side**2, self.longest))

    def declare(self, card: ModelCard, settings: RunnerSettings) -> Needs:
        text = self.config.text
        return Needs(
            cache_groups=cache_groups(text),
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            max_model_len=text.rope.max_length,
            tap_points=tuple(f"layer.{layer}" for layer in range(text.num_layers + 1)),
            media=MediaNeeds(len(self.config.vision.deepstack), position_rows=3, max_embeddings=self.max_embeddings, capture=True),
        )

    def supports(self, feature: str) -> Yes | No:
        if feature == "prompt_embeds":
            deep = self.config.vision.deepstack
            return No("layers after the first take features of images too, which no embedding tells") if deep else Yes()
        return Yes() if feature in FEATURES else No(f"Qwen-VL models know nothing of {feature!r}")

    def weight_map(self, card: ModelCard) -> WeightMap:
        return qwen_vl_weight_map(self.config)

    def build(self, ctx: BuildContext) -> QwenVLModel:
        if ctx.shard.size != 1:
            raise ValueError(f"Qwen-VL models run on one device; a shard of {ctx.shard.size} was asked for")
        return QwenVLModel(ctx, self.config, self.longest)

    def media_processor(self, tokenizer: Tokenizer | None) -> QwenVLProcessor:
        return QwenVLProcessor(self.card, self.config, tokenizer, self.max_embeddings)

    def encode(self, items: Sequence[EncoderInput], out: torch.Tensor) -> None:
        layout = layout_of(items, self.config.vision.merge)
        out.copy_(self.module.vision(patches_of(items, self.config.vision.temporal_patch_size, out.dtype), layout))

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
        if media is None or not self.config.vision.deepstack:
            return cast(torch.Tensor, self.module.text(hidden, positions, attention, tap))
        return self.module.text.stacked(hidden, positions, attention, tap, media)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.module.text.head(hidden))


def patches_of(items: Sequence[EncoderInput], frames: int, dtype: torch.dtype) -> torch.Tensor:
    """The items' pixels, normalised: [P, channels * frames * pixels of a patch]. frames: of a patch; a still image is in all of them."""
    made = []
    for item in items:
        pixels = normalised(item.tensors["pixels"], item.tensors["norm"])
        made.append(pixels.to(dtype).expand(-1, -1, frames, -1).flatten(1))
    return torch.cat(made)


def layout_of(items: Sequence[EncoderInput], merge: int) -> Layout:
    """Where the patches of several items lie, one item after the other."""

    def joined(name: str) -> torch.Tensor | None:
        return torch.cat([item.tensors[name] for item in items]) if name in items[0].tensors else None

    frames, windows, orders, before = list[int](), list[int](), [], 0
    for item in items:
        time, height, width = item.info["grid"]
        frames += [height * width] * time
        windows += item.info.get("windows", [])
        if "order" in item.tensors:
            orders.append(item.tensors["order"] + before)
        before += time * height * width // merge**2
    lengths = [item.tensors["frames"] for item in items]
    frame_starts = starts_of(lengths)
    return Layout(
        coordinates=torch.cat([item.tensors["coordinates"] for item in items]),
        frames=tuple(frames),
        frame_starts=frame_starts,
        windows=tuple(windows),
        window_starts=starts_of([item.tensors["windows"] for item in items]) if windows else frame_starts,
        order=torch.cat(orders) if orders else None,
        taps=joined("taps"),
        weights=joined("weights"),
    )
