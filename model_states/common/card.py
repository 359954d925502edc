"""Reading a `ModelCard` without torch: what bids of decoder families have in common."""

from __future__ import annotations

from collections.abc import Sequence

from modelrunner.checkpoint import ModelCard

FULL, SLIDING = "full_attention", "sliding_attention"  # entries of a configuration's `layer_types`


def called(card: ModelCard) -> str:
    """The model's name for messages; that of its file or folder where the settings named none."""
    return card.name or card.path.name


def architecture_of(card: ModelCard) -> str:
    """The transformers class name that the card asks for; empty when it names none."""
    return next(iter(card.config.get("architectures") or card.architectures), "")


def positive(card: ModelCard, field: str) -> int:
    """A required count of the configuration. Raises ValueError that names the field."""
    value = card.config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{card.name}: {field} is {value!r} in the configuration; a whole number above 0 is needed")
    return value


def head_counts(card: ModelCard) -> tuple[int, int]:
    """Query heads, and key and value heads (as many when the configuration does not say). Raises ValueError when they do not divide."""
    heads = positive(card, "num_attention_heads")
    kv_heads = int(card.config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ValueError(f"{card.name}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return heads, kv_heads


def windows_of(card: ModelCard, types: Sequence[str], layers: int, window: int | None, family: str) -> tuple[int | None, ...]:
    """Each layer's window in tokens, None where it sees everything.

    types: the layers' kinds, FULL or SLIDING. window: of the sliding ones; None means that they too see everything.
    family: for messages. Raises ValueError for another kind, or for a number of entries other than `layers`.
    """
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown or len(types) != layers:
        raise ValueError(
            f"{card.name}: layer_types has {len(types)} entries for {layers} layers, and these kinds that {family} models lack: {unknown}"
        )
    return tuple(window if kind == SLIDING else None for kind in types)
