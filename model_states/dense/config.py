"""The configuration of a dense decoder, read from a ModelCard; everything that differs between the architectures is decided here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelrunner.checkpoint import ModelCard
from modelrunner.model_states.common.rope_spec import RopeSpec, rope_spec

ACTIVATIONS = ("silu", "swish")


@dataclass(frozen=True)
class DenseConfig:
    """windows: for each layer the tokens that a query sees, itself included, or None for all. tied: the head shares the embedding."""

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
    windows: tuple[int | None, ...]
    rope: RopeSpec

    def group_of(self, layer: int) -> str:
        """Name of the cache group that serves `layer`."""
        return "full" if self.windows[layer] is None else "sliding"

    @property
    def window(self) -> int | None:
        """The sliding layers' window in tokens; None when there are none."""
        return next((window for window in self.windows if window is not None), None)


def architecture_of(card: ModelCard) -> str:
    """The transformers class name that the card asks for; empty when it names none."""
    return next(iter(card.config.get("architectures") or card.architectures), "")


def dense_config(card: ModelCard) -> DenseConfig:
    """Read `card`. Raises ValueError that names the field for whatever this family cannot run."""
    config = card.config
    architecture = architecture_of(card)
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{card.name}: hidden_act is {activation!r}; dense models run with {' or '.join(ACTIVATIONS)}")
    hidden, layers, heads = (positive(card, field) for field in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ValueError(f"{card.name}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = int(config.get("head_dim") or hidden // heads)
    try:
        rope = rope_spec({"max_position_embeddings": positive(card, "max_position_embeddings"), **config}, head_dim)
    except ValueError as error:
        raise ValueError(f"{card.name}: {error}") from error
    if rope.rotary_dim != head_dim:
        raise ValueError(
            f"{card.name}: partial_rotary_factor makes {rope.rotary_dim} of {head_dim} components rotate; dense models rotate all"
        )
    attention_bias = bool(config.get("attention_bias", False)) and architecture != "MistralForCausalLM"
    return DenseConfig(
        vocab_size=positive(card, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(card, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        output_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=layer_windows(card, config, architecture, layers),
        rope=rope,
    )


def positive(card: ModelCard, field: str) -> int:
    """A required count of the configuration."""
    value = card.config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{card.name}: {field} is {value!r} in the configuration; a whole number above 0 is needed")
    return value


def layer_windows(card: ModelCard, config: Mapping[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    """Each layer's window. Mistral slides in all layers; Qwen in those that `layer_types` names, or from `max_window_layers` on."""
    window = config.get("sliding_window")
    if architecture.startswith("Qwen") and not config.get("use_sliding_window", False):
        window = None
    if architecture == "LlamaForCausalLM" or window is None:
        types = ["full_attention"] * layers
    elif architecture == "MistralForCausalLM":
        types = ["sliding_attention"] * layers
    else:
        first = int(config.get("max_window_layers", layers))
        types = config.get("layer_types") or ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) != layers:
        raise ValueError(
            f"{card.name}: layer_types has {len(types)} entries for {layers} layers, and these kinds that dense models lack: {unknown}"
        )
    return tuple(int(window) if kind == "sliding_attention" and window is not None else None for kind in types)
