"""The configuration of a Gemma 3 text model, read from a ModelCard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelrunner.checkpoint import ModelCard
from modelrunner.model_states.common.card import FULL, SLIDING, head_counts, positive, windows_of
from modelrunner.model_states.common.rope_spec import RopeSpec, rope_spec

ACTIVATION = "gelu_pytorch_tanh"
# What other Gemma generations and uses have, and these models do not: field -> what it would be.
UNSUPPORTED = {"use_bidirectional_attention": "attention to later tokens", "attn_logit_softcapping": "a cap on attention scores"}
FULL_THETA, SLIDING_THETA = 1_000_000.0, 10_000.0  # bases of the rotary frequencies when the configuration names none
PATTERN = 6  # every sixth layer sees everything, unless the configuration says otherwise


@dataclass(frozen=True)
class Gemma3Config:
    """windows: for each layer the tokens that a query sees, itself included, or None for all. scale: factor on q.k.

    final_softcap: logits become cap * tanh(logits / cap); None for none. ropes: rotary positions of each cache group that there is,
    `full` and `sliding`. tied: the head shares the embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    bias: bool
    scale: float
    final_softcap: float | None
    windows: tuple[int | None, ...]
    ropes: Mapping[str, RopeSpec]
    max_length: int


def gemma3_config(card: ModelCard) -> Gemma3Config:
    """Read `card`. Raises ValueError that names the field for whatever this family cannot run."""
    config = card.config
    activation = config.get("hidden_activation") or ACTIVATION
    if activation != ACTIVATION:
        raise ValueError(f"{card.name}: hidden_activation is {activation!r}; Gemma 3 models run with {ACTIVATION}")
    for field, meaning in UNSUPPORTED.items():
        if config.get(field):
            raise ValueError(f"{card.name}: {field} is {config[field]!r} ({meaning}); it must be absent, null or false")
    heads, kv_heads = head_counts(card)
    head_dim = positive(card, "head_dim")
    windows = layer_windows(card, positive(card, "num_hidden_layers"))
    softcap = config.get("final_logit_softcapping")
    return Gemma3Config(
        vocab_size=positive(card, "vocab_size"),
        hidden_size=positive(card, "hidden_size"),
        intermediate_size=positive(card, "intermediate_size"),
        num_layers=len(windows),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", True)),
        bias=bool(config.get("attention_bias", False)),
        scale=float(config.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        final_softcap=float(softcap) if softcap else None,
        windows=windows,
        ropes=layer_ropes(card, head_dim, windows),
        max_length=positive(card, "max_position_embeddings"),
    )


def layer_windows(card: ModelCard, layers: int) -> tuple[int | None, ...]:
    """Each layer's window: from `layer_types`, or else every `sliding_window_pattern`-th layer sees everything."""
    pattern = int(card.config.get("sliding_window_pattern") or card.config.get("_sliding_window_pattern") or PATTERN)
    types = card.config.get("layer_types") or [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]
    return windows_of(card, types, layers, positive(card, "sliding_window") if SLIDING in types else None, "Gemma 3")


def layer_ropes(card: ModelCard, head_dim: int, windows: tuple[int | None, ...]) -> dict[str, RopeSpec]:
    """Rotary positions by cache group, whichever there are.

    transformers 5 writes `rope_parameters` with an entry for each layer type. Older files have `rope_theta` and `rope_scaling`, both for
    the layers that see everything, and `rope_local_base_freq` for the others.
    """
    config = card.config
    newer: Mapping[str, Any] = config.get("rope_parameters") or {}
    if newer and not newer.keys() & {FULL, SLIDING}:
        raise ValueError(f"{card.name}: rope_parameters have {sorted(newer)}; Gemma 3 models have an entry for each of {FULL}, {SLIDING}")
    bare = {"max_position_embeddings": positive(card, "max_position_embeddings")}
    older_full = {"rope_theta": config.get("rope_theta") or FULL_THETA, "rope_scaling": config.get("rope_scaling")}
    older = {FULL: older_full, SLIDING: {"rope_theta": config.get("rope_local_base_freq") or SLIDING_THETA}}
    ropes = {}
    for group, kind, present in (("full", FULL, None in windows), ("sliding", SLIDING, any(windows))):
        if present:
            try:
                ropes[group] = rope_spec({**bare, **older[kind], "rope_parameters": newer.get(kind)}, head_dim)
            except ValueError as error:
                raise ValueError(f"{card.name}: {kind}: {error}") from error
            if ropes[group].rotary_dim != head_dim:
                raise ValueError(
                    f"{card.name}: {kind}: {ropes[group].rotary_dim} of {head_dim} components rotate; Gemma 3 models rotate all"
                )
    return ropes
