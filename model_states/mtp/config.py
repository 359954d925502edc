"""The configuration of a multi-token-prediction module: its block is one of the target's own layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from modelrunner.checkpoint import ModelCard
from modelrunner.model_states.common.card import architecture_of, called
from modelrunner.model_states.common.draft_layers import block_config, with_biases
from modelrunner.model_states.dense.config import DenseConfig
from modelrunner.model_states.mtp import SOURCE


@dataclass(frozen=True)
class MTPConfig:
    """layer: of the module's one decoder layer, which sees all tokens. others: names in the checkpoint that belong to the target or to
    further modules."""

    layer: DenseConfig
    others: tuple[str, ...]


def mtp_config(card: ModelCard, names: Collection[str]) -> MTPConfig:
    """Read `card`. names: of the checkpoint's tensors; none for a checkpoint without weights.

    Raises ValueError when the checkpoint has no such module, and for whatever cannot run.
    """
    own = [name for name in names if name.startswith(f"{SOURCE}.")]
    if names and not own:
        raise ValueError(
            f"{called(card)}: none of its {len(names)} tensors is called {SOURCE}.*; it has no module for multi-token prediction"
        )
    layer = block_config(card, architecture_of(card), num_hidden_layers=1, sliding_window=None, layer_types=None)
    return MTPConfig(
        layer=with_biases(layer, own) if own else layer,
        others=tuple(name for name in names if not name.startswith(f"{SOURCE}.")),
    )
