"""Where the tensors of a dense checkpoint go. Names are the Hugging Face ones, translated for GGUF."""

from __future__ import annotations

from functools import partial

import torch

from modelrunner.checkpoint import ModelCard
from modelrunner.model_states.common.decoder_weights import (
    FUSED_PROJECTIONS,
    HEAD_NORMS,
    PROJECTIONS,
    ignored_names,
    layer_targets,
    outer_targets,
)
from modelrunner.model_states.common.gguf import gguf_name, unpermute
from modelrunner.model_states.common.rope import cos_sin_table, inverse_frequencies
from modelrunner.model_states.dense.config import DenseConfig
from modelrunner.weights import Target, WeightMap

NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}


def dense_weight_map(card: ModelCard, config: DenseConfig, max_length: int) -> WeightMap:
    """The weight map of `card`. max_length: rows of the rotary table."""
    norms = {**NORMS, **(HEAD_NORMS if config.qk_norm else {})}
    projections = FUSED_PROJECTIONS if config.fused else PROJECTIONS
    names = outer_targets(config.tied)
    for layer in range(config.num_layers):
        names.update(layer_targets(layer, norms, projections=projections, biased=biased_linears(config)))
    ignored = (*ignored_names(config.num_layers, config.tied), "model.mtp_layers.*")  # which a drafter reads
    if card.format != "gguf":
        return WeightMap(names, ignored)
    translated = {gguf_name(name): targets for name, targets in names.items()}
    if card.metadata.get("general.architecture") == "llama":
        translated = {name: unpermuted(name, targets, config) for name, targets in translated.items()}
    # Llama 3's stretched frequencies come as divisors of the plain ones, in a tensor.
    translated["rope_freqs.weight"] = (Target("cos_sin", kind="parameter", transform=partial(rope_table, config, max_length)),)
    return WeightMap(translated, optional=frozenset({"rope_freqs.weight"}))


def biased_linears(config: DenseConfig) -> list[str]:
    """Linears of a layer that have a bias."""
    given = {
        "attention.qkv": config.qkv_bias,
        "attention.output": config.output_bias,
        "mlp.gate_up": config.mlp_bias,
        "mlp.down": config.mlp_bias,
    }
    return [linear for linear, has_bias in given.items() if has_bias]


def unpermuted(name: str, targets: tuple[Target, ...], config: DenseConfig) -> tuple[Target, ...]:
    """`targets` with the Llama converter's row order of q and k undone."""
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return targets
    return tuple(Target(target.path, target.part, target.kind, partial(unpermute, num_heads=heads), target.shard_dim) for target in targets)


def rope_table(config: DenseConfig, max_length: int, divisors: torch.Tensor) -> torch.Tensor:
    """The rotary table with frequencies divided by `divisors` [D / 2]."""
    frequencies, scaling = inverse_frequencies(config.rope, max_length)
    return cos_sin_table(frequencies / divisors.float(), scaling, max_length)
