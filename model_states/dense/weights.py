"""Where the tensors of a dense checkpoint go. Names are the Hugging Face ones, translated for GGUF."""

from __future__ import annotations

from functools import partial

import torch

from modelrunner.checkpoint import ModelCard
from modelrunner.model_states.common.gguf import gguf_name, unpermute
from modelrunner.model_states.common.rope import cos_sin_table, inverse_frequencies
from modelrunner.model_states.dense.config import DenseConfig
from modelrunner.weights import Target, WeightMap

# Hugging Face name of a projection -> (Linear in the layer, part, dimension split over devices)
PROJECTIONS = {
    "self_attn.q_proj": ("attention.qkv", 0, 0),
    "self_attn.k_proj": ("attention.qkv", 1, 0),
    "self_attn.v_proj": ("attention.qkv", 2, 0),
    "self_attn.o_proj": ("attention.output", 0, 1),
    "mlp.gate_proj": ("mlp.gate_up", 0, 0),
    "mlp.up_proj": ("mlp.gate_up", 1, 0),
    "mlp.down_proj": ("mlp.down", 0, 1),
}
NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
HEAD_NORMS = {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}


def dense_weight_map(card: ModelCard, config: DenseConfig, max_length: int) -> WeightMap:
    """The weight map of `card`. max_length: rows of the rotary table."""
    names = global_targets(config)
    for layer in range(config.num_layers):
        names.update(layer_targets(config, layer))
    # Buffers that old exports carry, and the head that some write although it is tied.
    ignored = (*(f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(config.num_layers)), *(["lm_head.weight"] * config.tied))
    if card.format != "gguf":
        return WeightMap(names, ignored)
    translated = {gguf_name(name): targets for name, targets in names.items()}
    if card.metadata.get("general.architecture") == "llama":
        translated = {name: unpermuted(name, targets, config) for name, targets in translated.items()}
    # Llama 3's stretched frequencies come as divisors of the plain ones, in a tensor.
    translated["rope_freqs.weight"] = (Target("cos_sin", kind="parameter", transform=partial(rope_table, config, max_length)),)
    return WeightMap(translated, optional=frozenset({"rope_freqs.weight"}))


def global_targets(config: DenseConfig) -> dict[str, tuple[Target, ...]]:
    embed = Target("embed.weight", kind="parameter", shard_dim=0)
    head = Target("head", shard_dim=0)
    norm = {"model.norm.weight": (Target("norm.weight", kind="parameter"),)}
    if config.tied:
        return {"model.embed_tokens.weight": (embed, head), **norm}
    return {"model.embed_tokens.weight": (embed,), "lm_head.weight": (head,), **norm}


def layer_targets(config: DenseConfig, layer: int) -> dict[str, tuple[Target, ...]]:
    source, target = f"model.layers.{layer}", f"layers.{layer}"
    biased = {"attention.qkv": config.qkv_bias, "attention.output": config.output_bias}
    names: dict[str, tuple[Target, ...]] = {}
    for name, (linear, part, shard_dim) in PROJECTIONS.items():
        names[f"{source}.{name}.weight"] = (Target(f"{target}.{linear}", part, shard_dim=shard_dim),)
        if biased.get(linear, config.mlp_bias):
            # The bias of a product whose input is split is added once, so it is not split.
            names[f"{source}.{name}.bias"] = (Target(f"{target}.{linear}", part, "bias", shard_dim=0 if shard_dim == 0 else None),)
    for name, norm in {**NORMS, **(HEAD_NORMS if config.qk_norm else {})}.items():
        names[f"{source}.{name}.weight"] = (Target(f"{target}.{norm}.weight", kind="parameter"),)
    return names


def unpermuted(name: str, targets: tuple[Target, ...], config: DenseConfig) -> tuple[Target, ...]:
    """`targets` with the Llama converter's row order of q and k undone."""
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return targets
    return tuple(Target(target.path, target.part, target.kind, partial(unpermute, num_heads=heads), target.shard_dim) for target in targets)


def rope_table(config: DenseConfig, max_length: int, divisors: torch.Tensor) -> torch.Tensor:
    """The rotary table with frequencies divided by `divisors` [D / 2]."""
    frequencies, scaling = inverse_frequencies(config.rope)
    return cos_sin_table(frequencies / divisors.float(), scaling, max_length)
