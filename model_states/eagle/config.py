"""The configuration of an EAGLE head, from its ModelCard and the names of its tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from modelrunner.checkpoint import ModelCard
from modelrunner.model_states.common.draft_layers import block_config, with_biases
from modelrunner.model_states.dense.config import DenseConfig


@dataclass(frozen=True)
class EagleConfig:
    """layer: of the head's decoder layers. fc_bias: whether `fc` adds one. own_embedding, own_head: whether the checkpoint has them; the
    target's are used otherwise."""

    layer: DenseConfig
    fc_bias: bool
    own_embedding: bool
    own_head: bool


def eagle_config(card: ModelCard, names: Collection[str]) -> EagleConfig:
    """Read `card`. names: of the checkpoint's tensors; none for a checkpoint without weights, which then shares what it can.

    Raises ValueError that names the field for whatever cannot run.
    """
    return EagleConfig(
        layer=with_biases(block_config(card, "LlamaForCausalLM"), names),
        fc_bias="fc.bias" in names,
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
    )
