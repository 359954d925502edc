"""Where the tensors of Medusa heads go: `<head>.<block>.linear.*`, and `<head>.<number of blocks>.weight` for the projection."""

from __future__ import annotations

from modelrunner.model_states.common.decoder_weights import Targets
from modelrunner.model_states.medusa.config import MedusaConfig
from modelrunner.weights import Target, WeightMap


def medusa_weight_map(config: MedusaConfig) -> WeightMap:
    """The weight map of a checkpoint of that configuration."""
    names: Targets = {}
    for head in range(config.num_heads):
        for block in range(config.num_layers):
            for kind in ("weight", "bias"):
                names[f"{head}.{block}.linear.{kind}"] = (Target(f"heads.{head}.blocks.{block}", kind=kind, shard_dim=0),)
        names[f"{head}.{config.num_layers}.weight"] = (Target(f"heads.{head}.output", shard_dim=0),)
    return WeightMap(names)
