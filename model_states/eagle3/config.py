"""The configuration of an EAGLE-3 head, from its ModelCard and the names of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from modelrunner.checkpoint import ModelCard
from modelrunner.model_states.common.draft_layers import block_config, with_biases
from modelrunner.model_states.dense.config import DenseConfig

NUM_FUSED = 3  # hidden states of the target that the published heads fuse
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Eagle3Config:
    """layer: of the head's decoder layer; its vocabulary is the target's. draft_vocab_size: ids that the head predicts. mapped: whether
    `d2t` says which of the target's ids they are. target_hidden_size: of the hidden states that are fused, of layers `layer_ids`: i is the
    residual stream that enters layer i. norm_before_residual: whether the stream begins with the normed features.
    source: the layer's name in the checkpoint. own_embedding, own_head: whether the checkpoint has them; the target's are used otherwise.
    """

    layer: DenseConfig
    draft_vocab_size: int
    mapped: bool
    target_hidden_size: int
    layer_ids: tuple[int, ...]
    fc_bias: bool
    norm_before_residual: bool
    source: str
    own_embedding: bool
    own_head: bool


def flat_card(card: ModelCard) -> ModelCard:
    """`card` with the decoder layer's fields beside the head's: one published layout nests them, and one nests the head's."""
    config: dict[str, Any] = dict(card.config)
    for field in ("transformer_layer_config", "eagle_config"):
        nested = config.pop(field, None)
        if isinstance(nested, Mapping):
            config = {**nested, **config}
    return replace(card, config=config)


def fused_layers(card: ModelCard, target_layers: int) -> tuple[int, ...]:
    """Which hidden states of a target of `target_layers` layers are fused: those that `card` names, or else the published choice of a low,
    a middle and a high one. Raises ValueError for layers that the target lacks."""
    given = card.config.get(LAYER_IDS)
    ids = tuple(int(layer) for layer in given) if given else (2, target_layers // 2, target_layers - 3)
    if len(ids) != NUM_FUSED or not all(0 <= layer <= target_layers for layer in ids):
        source = LAYER_IDS if given else f"the default of a head whose configuration lacks {LAYER_IDS}"
        raise ValueError(
            f"{card.name}: fuses the hidden states {list(ids)} ({source}); {NUM_FUSED} numbers from 0 to {target_layers}, the target's "
            "layers, are needed"
        )
    return ids


def eagle3_config(card: ModelCard, names: Collection[str], target: Mapping[str, Any]) -> Eagle3Config:
    """Read `card`. names: of the checkpoint's tensors; none for a checkpoint without weights, which then shares what it can.

    target: the target's configuration. Raises ValueError that names the field for whatever cannot run.
    """
    card = flat_card(card)
    layer = with_biases(block_config(card, "LlamaForCausalLM"), names)
    if layer.num_layers != 1:
        raise ValueError(f"{card.name}: num_hidden_layers is {layer.num_layers}; an EAGLE-3 head has 1 decoder layer")
    target_vocab = int(target["vocab_size"])
    layer = replace(layer, vocab_size=target_vocab)
    draft_vocab = int(card.config.get("draft_vocab_size") or target_vocab)
    if not 0 < draft_vocab <= target_vocab:
        raise ValueError(f"{card.name}: draft_vocab_size is {draft_vocab}; 1 to {target_vocab} are possible, the ids of the target")
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=draft_vocab,
        mapped=draft_vocab != target_vocab or "d2t" in names,
        target_hidden_size=int(target["hidden_size"]),
        layer_ids=fused_layers(card, int(target["num_hidden_layers"])),
        fc_bias="fc.bias" in names,
        norm_before_residual=bool(card.config.get("norm_before_residual", False)),
        source="layers.0" if any(name.startswith("layers.0.") for name in names) else "midlayer",
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names or draft_vocab != target_vocab,
    )
