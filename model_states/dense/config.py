"""The configuration of a dense decoder, read from a ModelCard; everything that differs between the architectures is decided here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelrunner.checkpoint import ModelCard
from modelrunner.model_states.common.card import FULL, SLIDING, architecture_of, head_counts, positive, windows_of
from modelrunner.model_states.common.rope_spec import RopeSpec, rope_spec

ACTIVATIONS = ("silu", "swish")
ALWAYS_SLIDING = ("MistralForCausalLM", "Phi3ForCausalLM")  # in all layers, when they have a window
PARTLY_ROTARY = ("Phi3ForCausalLM",)
WITHOUT_BIAS = ("MistralForCausalLM", "Phi3ForCausalLM")
QWEN2 = ("Qwen2ForCausalLM", "MiMoForCausalLM")  # MiMo: Qwen2's layers, and a module for multi-token prediction beside them


@dataclass(frozen=True)
class DenseConfig:
    """windows: for each layer the tokens that a query sees, itself included, or None for all. tied: the head shares the embedding.
    fused: the checkpoint stores q, k and v, and gate and up, as one tensor each.
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
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    fused: bool
    windows: tuple[int | None, ...]
    rope: RopeSpec


def dense_config(card: ModelCard) -> DenseConfig:
    """Read `card`. Raises ValueError that names the field for whatever this family cannot run."""
    config = card.config
    architecture = architecture_of(card)
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{card.name}: hidden_act is {activation!r}; dense models run with {' or '.join(ACTIVATIONS)}")
    hidden, layers = positive(card, "hidden_size"), positive(card, "num_hidden_layers")
    heads, kv_heads = head_counts(card)
    head_dim = int(config.get("head_dim") or hidden // heads)
    try:
        rope = rope_spec({"max_position_embeddings": positive(card, "max_position_embeddings"), **config}, head_dim)
    except ValueError as error:
        raise ValueError(f"{card.name}: {error}") from error
    if rope.rotary_dim != head_dim and architecture not in PARTLY_ROTARY:
        raise ValueError(
            f"{card.name}: partial_rotary_factor makes {rope.rotary_dim} of {head_dim} components rotate; "
            f"of dense models only {', '.join(PARTLY_ROTARY)} rotate a part"
        )
    eps = float(config.get("rms_norm_eps", 1e-6))
    if not 0 < eps < math.inf:
        raise ValueError(f"{card.name}: rms_norm_eps is {eps}; a finite number above 0 is needed")
    attention_bias = bool(config.get("attention_bias", False)) and architecture not in WITHOUT_BIAS
    return DenseConfig(
        vocab_size=positive(card, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(card, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        eps=eps,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=architecture in QWEN2 or attention_bias,
        output_bias=architecture not in QWEN2 and attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        fused=architecture == "Phi3ForCausalLM",
        windows=layer_windows(card, config, architecture, layers),
        rope=rope,
    )


def layer_windows(card: ModelCard, config: Mapping[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    """Each layer's window. Mistral and Phi-3 slide in all layers; Qwen in those of `layer_types`, or from `max_window_layers` on."""
    window = config.get("sliding_window")
    if architecture.startswith(("Qwen", "MiMo")) and not config.get("use_sliding_window", False):
        window = None
    if architecture == "LlamaForCausalLM" or window is None:
        types = [FULL] * layers
    elif architecture in ALWAYS_SLIDING:
        types = [SLIDING] * layers
    else:
        first = int(config.get("max_window_layers", layers))
        types = config.get("layer_types") or [SLIDING if layer >= first else FULL for layer in range(layers)]
    return windows_of(card, types, layers, None if window is None else int(window), "dense")
