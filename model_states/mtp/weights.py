"""Where the tensors of a module for multi-token prediction go; the rest of the checkpoint is the target's."""

from __future__ import annotations

from modelrunner.model_states.common.decoder_weights import HEAD_NORMS, Targets, layer_targets
from modelrunner.model_states.dense.weights import NORMS, biased_linears
from modelrunner.model_states.mtp import SOURCE
from modelrunner.model_states.mtp.config import MTPConfig
from modelrunner.weights import Target, WeightMap

OUTER_NORMS = {"token_layernorm": "token_norm", "hidden_layernorm": "hidden_norm", "final_layernorm": "norm"}


def mtp_weight_map(config: MTPConfig) -> WeightMap:
    """The weight map of a checkpoint of that configuration."""
    norms = {**NORMS, **(HEAD_NORMS if config.layer.qk_norm else {})}
    names: Targets = {
        f"{SOURCE}.input_proj.weight": (Target("projection", shard_dim=0),),
        **{f"{SOURCE}.{name}.weight": (Target(f"{norm}.weight", kind="parameter"),) for name, norm in OUTER_NORMS.items()},
        **layer_targets(0, norms, biased=biased_linears(config.layer), source=SOURCE, target="layer"),
    }
    return WeightMap(names, ignored=config.others)
