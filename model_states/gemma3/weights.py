"""Where the tensors of a Gemma 3 checkpoint go. Names are the Hugging Face ones, translated for GGUF."""

from __future__ import annotations

import torch

from modelrunner.checkpoint import ModelCard
from modelrunner.model_states.common.decoder_weights import HEAD_NORMS, ignored_names, layer_targets, outer_targets
from modelrunner.model_states.common.gguf import gguf_name
from modelrunner.model_states.gemma3.config import Gemma3Config
from modelrunner.weights import WeightMap

NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
    **HEAD_NORMS,
}
GGUF_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def plus_one(weight: torch.Tensor) -> torch.Tensor:
    """The factor of a norm, in float32; checkpoints store its distance from one."""
    return weight.float() + 1.0


def gemma3_weight_map(card: ModelCard, config: Gemma3Config) -> WeightMap:
    """The weight map of `card`."""
    in_gguf = card.format == "gguf"  # whose converter has added the one already
    transform = None if in_gguf else plus_one
    names = outer_targets(config.tied, transform)
    biased = ("attention.qkv", "attention.output") if config.bias else ()
    for layer in range(config.num_layers):
        names.update(layer_targets(layer, NORMS, biased=biased, norm_transform=transform))
    if in_gguf:
        return WeightMap({gguf_name(name, GGUF_NAMES): targets for name, targets in names.items()})
    return WeightMap(names, ignored_names(config.num_layers, config.tied))
