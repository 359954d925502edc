"""Tiny Qwen-VL models, and what transformers takes as their input."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from modelrunner.media import Expanded, MediaItem

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
    "vision_config": {
        **VISION,
        "intermediate_size": 42,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": 2,
    },
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


def digits(text: str) -> list[int]:
    """Ids of time stamps: one for each character."""
    return [10 + ord(character) % 60 for character in text]


def inputs_of_transformers(prompt: Expanded, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
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
