"""Where the tensors of an EAGLE-3 checkpoint go: `fc`, `midlayer.*` (or `layers.0.*`), `norm`, `lm_head`, `d2t`, `embed_tokens`."""

from __future__ import annotations

from functools import partial

import torch

from modelrunner.model_states.common.decoder_weights import Targets, layer_targets
from modelrunner.model_states.dense.weights import biased_linears
from modelrunner.model_states.eagle3.config import Eagle3Config
from modelrunner.weights import Target, WeightMap

NORMS = {"input_layernorm": "input_norm", "hidden_norm": "hidden_norm", "post_attention_layernorm": "mlp_norm"}


def eagle3_weight_map(config: Eagle3Config) -> WeightMap:
    """The weight map of a checkpoint of that configuration. `t2d`, which target ids have a draft id, only serves training."""
    layer = config.layer
    names: Targets = {
        "fc.weight": (Target("fc", shard_dim=0),),
        "norm.weight": (Target("norm.weight", kind="parameter"),),
        **layer_targets(0, NORMS, biased=biased_linears(layer), source=config.source, target="layer"),
    }
    if config.fc_bias:
        names["fc.bias"] = (Target("fc", kind="bias", shard_dim=0),)
    if config.own_embedding:
        names["embed_tokens.weight"] = (Target("embed.weight", kind="parameter", shard_dim=0),)
    if config.own_head:
        names["lm_head.weight"] = (Target("head", shard_dim=0),)
    if config.mapped:
        names["d2t"] = (Target("d2t", kind="parameter", transform=partial(checked_offsets, vocab_size=layer.vocab_size)),)
    return WeightMap(names, ignored=("t2d", f"{config.source}.self_attn.rotary_emb.inv_freq"))


def checked_offsets(offsets: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`d2t` as int64. Raises ValueError for offsets that lead out of the target's vocabulary."""
    ids = offsets.to(torch.int64) + torch.arange(offsets.numel())
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise ValueError(f"maps a draft id to {wrong}, which is not in the target's vocabulary of {vocab_size} ids")
    return offsets.to(torch.int64)
