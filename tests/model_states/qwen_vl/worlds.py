"""Tiny random Qwen-VL models: written by transformers, and run by our state without an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from modelrunner.attention import AttentionBackend, BoundAttention
from modelrunner.checkpoint import SafetensorsReader
from modelrunner.linear import LinearFactory, PlainScheme
from modelrunner.media import EncoderInput, Expanded, MediaBatch, MediaItem, Video
from modelrunner.model_state import BuildContext, FullAttention
from modelrunner.model_states import qwen_vl
from modelrunner.model_states.qwen_vl.processor import QwenVLProcessor
from modelrunner.model_states.qwen_vl.state import QwenVLState
from modelrunner.offers import Offer
from modelrunner.ops import Ops, Registry
from modelrunner.plugins import hub, reference_kernels
from modelrunner.settings import load_settings
from modelrunner.weights import load_weights

IMAGE, VIDEO, START, END = 90, 91, 92, 93  # token ids
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Small enough that awkward images give a dozen tokens: patches of 4 pixels, so tokens of 8, and windows of 2 x 2 tokens.
VISION = {"depth": 4, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40, "patch_size": 4, "initializer_range": 0.15}
OLDER = {
    "model_type": "qwen2_5_vl",
    "text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "vision_config": {**VISION, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1, 3], "tokens_per_second": 2},
    "tie_word_embeddings": False,
    **TOKENS,
}
NEWER = {
    "model_type": "qwen3_vl",
    "text_config": {**TEXT, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
    "vision_config": {**VISION, "out_hidden_size": 32, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1, 3]},
    "tie_word_embeddings": False,
    **TOKENS,
}
CONFIGS = {"qwen2.5": OLDER, "qwen3": NEWER}
LIMITS = {"min_pixels": 64, "max_pixels": 64 * 60}  # of images and frames in the tests


class Digits:
    """A tokenizer for time stamps: a token for each character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [10 + ord(character) % 60 for character in text]


def make_model(config: Mapping[str, Any], seed: int = 0) -> Any:
    """A transformers model in float32 whose norms and biases are noise too."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    fields = json.loads(json.dumps(config))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = AutoConfig.for_model(fields.pop("model_type"), **fields)
        model: Any = AutoModelForImageTextToText.from_config(made, attn_implementation="eager", dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def cpu_ops() -> Ops:
    registry = Registry()
    reference_kernels.kernels(registry.for_plugin("test"), SimpleNamespace(type="cpu"))
    return registry.resolve("cpu")


class Loaded:
    """Our state with the weights of a folder, without an engine."""

    def __init__(self, folder: Path) -> None:
        reader = SafetensorsReader(folder, "tiny")
        self.settings = load_settings({"model": "tiny"}, sections={})
        card = reader.card()
        config = hub.model_config(card)
        assert isinstance(config, Offer)
        self.card = card.with_config(config.load())
        offer = qwen_vl.model_state(self.card)
        assert isinstance(offer, Offer), offer
        self.state: QwenVLState = offer.load()(self.card, self.settings)
        self.needs = self.state.declare(self.card, self.settings)
        self.ops, device = cpu_ops(), torch.device("cpu")
        linear = LinearFactory(PlainScheme(self.ops, torch.float32, device))
        self.state.module = self.state.build(BuildContext(self.settings, self.card, self.ops, linear, torch.float32, device))
        load_weights(self.state.module, self.state.weight_map(self.card), reader, progress=False)
        self.processor: QwenVLProcessor = self.state.media_processor(Digits())

    def encode(self, items: Sequence[MediaItem]) -> torch.Tensor:
        """[embeddings, width] of the items together."""
        given = [EncoderInput(item.kind, item.num_embeddings, item.tensors, json.loads(json.dumps(item.info))) for item in items]
        out = torch.full((sum(item.num_embeddings for item in items), self.needs.media.width(self.needs.hidden_size)), torch.nan)
        with torch.inference_mode():
            self.state.encode(given, out)
        return out

    def logits(self, prompt: Expanded, items: Sequence[MediaItem]) -> torch.Tensor:
        """[tokens, vocabulary] of a whole prompt at once."""
        count, width = len(prompt.token_ids), self.needs.hidden_size
        hidden, slots = torch.full((count, width), torch.nan), torch.full((count,), -1)
        starts = np.cumsum([0, *(item.num_embeddings for item in items)])
        for run in prompt.runs:
            slots[run.start : run.start + run.length] = torch.arange(run.length) + run.offset + int(starts[run.item])
        backends = [WholeSequence(group, self.ops) for group in self.needs.cache_groups]
        attention = {each.group.name: BoundAttention(each, {n: n for n in each.group.layers}, SimpleNamespace()) for each in backends}
        positions = torch.from_numpy(self.processor.positions(prompt, items)).long() if items else torch.arange(count)
        media = MediaBatch(self.encode(items), slots) if items else None
        with torch.inference_mode():
            self.state.embed(SimpleNamespace(input_ids=torch.tensor(prompt.token_ids)), hidden)
            if media is not None:
                self.ops.place_media(hidden, media.arena, media.slots)
            return self.state.logits(self.state.forward(hidden, positions, attention, {}, lambda name, x: x, media=media))


def picture(width: int, height: int, seed: int = 0) -> Any:
    """A smooth random RGB picture."""
    from PIL import Image

    coarse = np.random.default_rng(seed).integers(0, 256, (max(2, height // 6), max(2, width // 6), 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def film(frames: int, width: int, height: int, fps: float = 2.0, seed: int = 0) -> Video:
    """A random video."""
    shots = np.stack([np.asarray(picture(width, height, 100 * seed + n)) for n in range(frames)])
    return Video(shots, fps, tuple(n / fps for n in range(frames)))


class WholeSequence(AttentionBackend):
    """Attention for one sequence computed at once: causal."""

    def __init__(self, group: FullAttention, ops: Ops) -> None:
        super().__init__(group, torch.empty(0), ops, torch.float32)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, step: Any, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.group.scale, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


def inputs_of_transformers(loaded: Loaded, prompt: Expanded, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """The arguments that a transformers model takes for a prompt."""
    ids = torch.tensor([prompt.token_ids])
    given = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}
    for kind, pixels, grid in (("image", "pixel_values", "image_grid_thw"), ("video", "pixel_values_videos", "video_grid_thw")):
        some = [item for item in items if item.kind == kind]
        if some:
            given |= {pixels: torch.cat([pixels_of(item) for item in some]), grid: torch.tensor([item.info["grid"] for item in some])}
    return given


def pixels_of(item: MediaItem) -> torch.Tensor:
    """An item's pixels as transformers takes them: every frame there, normalised, tokens in their own order."""
    scale, mean, deviation = item.tensors["norm"][:, None, :, None, None]
    pixels = (item.tensors["pixels"].float() * scale - mean) / deviation
    pixels = pixels.expand(-1, -1, 2, -1).flatten(1)
    if "order" not in item.tensors:
        return pixels
    by_token = pixels.unflatten(0, (-1, 4))
    return torch.empty_like(by_token).index_copy_(0, item.tensors["order"], by_token).flatten(0, 1)
