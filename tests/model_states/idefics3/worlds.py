"""Tiny Idefics3 and SmolVLM models, and what transformers takes as their input."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from modelrunner.media import Expanded, MediaItem
from tests.model_states.media_worlds import make_model

IMAGE = 90
TEXT = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PATCH = 4
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": PATCH,
}
CONFIG: Mapping[str, Any] = {
    "text_config": TEXT,
    "vision_config": {**VISION, "initializer_range": 0.15},
    "scale_factor": 2,
    "image_token_id": IMAGE,
}
# Tiles of the table's size, and larger ones, whose positions are looked up in between. An image is up to three tiles wide.
SIDES = {"idefics3": 24, "smolvlm": 40}


def write(kind: str, folder: Path, seed: int = 0) -> Any:
    """Write a checkpoint with the file of its processor; returns the transformers model."""
    model = make_model({**CONFIG, "model_type": kind}, seed)
    model.save_pretrained(folder)
    side = SIDES[kind]
    sizes = {"size": {"longest_edge": 3 * side}, "max_image_size": {"longest_edge": side}}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    return model


def tags(text: str) -> list[int]:
    """Ids of text between tiles: one for each tag, and one for each run of line ends."""
    parts = re.findall(r"<[^>]*>|\n+", text)
    assert "".join(parts) == text
    return [IMAGE if part == "<image>" else 64 + sum(part.encode()) % 20 for part in parts]


def pixels_of(item: MediaItem) -> torch.Tensor:
    """[1, tiles, channels, side, side], normalised."""
    scale, mean, deviation = item.tensors["norm"][:, None, :, None]
    pixels = (item.tensors["pixels"].float() * scale - mean) / deviation
    across = int((len(pixels) // item.info["tiles"]) ** 0.5)
    tiles = pixels.view(-1, across, across, 3, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
    return tiles.reshape(1, -1, 3, across * PATCH, across * PATCH)


def inputs_of_transformers(prompt: Expanded, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """The arguments that a transformers model takes for a prompt."""
    given = {"input_ids": torch.tensor([prompt.token_ids])}
    return given | ({"pixel_values": torch.cat([pixels_of(item) for item in items], 1)} if items else {})
