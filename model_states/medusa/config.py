"""The configuration of Medusa heads, from their ModelCard and the names of their tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from modelrunner.checkpoint import ModelCard
from modelrunner.model_states.common.card import positive


@dataclass(frozen=True)
class MedusaConfig:
    """num_heads: heads, each of num_layers residual blocks of `hidden_size` and a projection to `vocab_size` ids."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int


def medusa_config(card: ModelCard, names: Collection[str], target: Mapping[str, Any]) -> MedusaConfig:
    """Read `card`. names: of the checkpoint's tensors, which say how many heads there are: published configurations are wrong there.

    target: the target's configuration, which has the sizes. Raises ValueError that names a field that is missing or does not fit.
    """
    for field in ("hidden_size", "vocab_size"):
        if (own := card.config.get(field)) is not None and int(own) != int(target[field]):
            raise ValueError(f"{card.name}: {field} is {own} in the heads' configuration and {target[field]} in the target's")
    heads = {int(name.split(".", 1)[0]) for name in names if name.split(".", 1)[0].isdigit()}
    return MedusaConfig(
        num_heads=1 + max(heads) if heads else positive(card, "medusa_num_heads"),
        num_layers=positive(card, "medusa_num_layers"),
        hidden_size=int(target["hidden_size"]),
        vocab_size=int(target["vocab_size"]),
    )
