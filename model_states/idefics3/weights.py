"""Where the tensors of an Idefics3 or SmolVLM checkpoint go. Names are the Hugging Face ones."""

from __future__ import annotations

from dataclasses import replace

from modelrunner.model_states.common.decoder_weights import Targets, ignored_names, layer_targets, outer_targets
from modelrunner.model_states.common.encoder_weights import linear_targets, norm_targets
from modelrunner.model_states.dense.weights import NORMS, biased_linears
from modelrunner.model_states.idefics3.config import Idefics3Config
from modelrunner.weights import Target, WeightMap

PRODUCTS = {
    "self_attn.q_proj": ("attention.qkv", 0),
    "self_attn.k_proj": ("attention.qkv", 1),
    "self_attn.v_proj": ("attention.qkv", 2),
    "self_attn.out_proj": ("attention.output", 0),
    "mlp.fc1": ("mlp.up", 0),
    "mlp.fc2": ("mlp.down", 0),
}
NORMS_OF_BLOCK = {"layer_norm1": "attention_norm", "layer_norm2": "mlp_norm"}


def idefics3_weight_map(config: Idefics3Config) -> WeightMap:
    """The weight map of a checkpoint of `config`."""
    text = config.text
    decoder = outer_targets(text.tied)
    for layer in range(text.num_layers):
        decoder.update(layer_targets(layer, NORMS, biased=biased_linears(text)))
    names: Targets = {
        in_text_model(name): tuple(replace(target, path=f"text.{target.path}") for target in targets) for name, targets in decoder.items()
    }
    names.update(vision_targets(config))
    return WeightMap(names, tuple(in_text_model(name) for name in ignored_names(text.num_layers, text.tied)))


def in_text_model(name: str) -> str:
    """A decoder's name as it is within the whole."""
    return f"model.text_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


def vision_targets(config: Idefics3Config) -> Targets:
    """Tensors of the vision tower and of the projection behind it."""
    source = "model.vision_model"
    names = linear_targets(f"{source}.embeddings.patch_embedding", "vision.embed", flatten=True)
    names[f"{source}.embeddings.position_embedding.weight"] = (Target("vision.positions", kind="parameter"),)
    for block in range(config.vision.num_layers):
        inside, target = f"{source}.encoder.layers.{block}", f"vision.blocks.{block}"
        for name, (path, part) in PRODUCTS.items():
            names.update(linear_targets(f"{inside}.{name}", f"{target}.{path}", part))
        for name, path in NORMS_OF_BLOCK.items():
            names.update(norm_targets(f"{inside}.{name}", f"{target}.{path}"))
    names.update(norm_targets(f"{source}.post_layernorm", "vision.norm"))
    names.update(linear_targets("model.connector.modality_projection.proj", "vision.projection", bias=False))
    return names
