"""Where the tensors of an EAGLE checkpoint go: `fc`, `layers.N.*`, and where it has them `embed_tokens` and `lm_head`."""

from __future__ import annotations

from modelrunner.model_states.common.decoder_weights import HEAD_NORMS, Targets, layer_targets
from modelrunner.model_states.dense.weights import NORMS, biased_linears
from modelrunner.model_states.eagle.config import EagleConfig
from modelrunner.weights import Target, WeightMap

FIRST_NORMS = {name: norm for name, norm in NORMS.items() if norm != "attention_norm"}  # the first layer's input is not normed


def eagle_weight_map(config: EagleConfig) -> WeightMap:
    """The weight map of a checkpoint of that configuration."""
    layer = config.layer
    names: Targets = {"fc.weight": (Target("fc", shard_dim=0),)}
    if config.fc_bias:
        names["fc.bias"] = (Target("fc", kind="bias", shard_dim=0),)
    if config.own_embedding:
        names["embed_tokens.weight"] = (Target("embed.weight", kind="parameter", shard_dim=0),)
    if config.own_head:
        names["lm_head.weight"] = (Target("head", shard_dim=0),)
    for index in range(layer.num_layers):
        norms = {**(NORMS if index else FIRST_NORMS), **(HEAD_NORMS if layer.qk_norm else {})}
        names.update(layer_targets(index, norms, biased=biased_linears(layer), source=f"layers.{index}"))
    return WeightMap(names, ignored=tuple(f"layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(layer.num_layers)))
