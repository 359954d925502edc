"""GGUF metadata as a configuration in the Hugging Face config's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelrunner.errors import CheckpointError

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard

# GGUF architecture -> (transformers class, model_type). Others keep their GGUF name, for a plugin that knows it.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
# Hugging Face name -> GGUF name below the architecture's
REQUIRED = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
}
TOKEN_IDS = ("bos_token_id", "eos_token_id")


def gguf_config(card: ModelCard) -> dict[str, Any]:
    """Translate `card.metadata`. Raises CheckpointError that lists absent entries."""
    metadata = card.metadata
    arch = str(metadata["general.architecture"])
    absent = [f"{arch}.{key}" for key in REQUIRED.values() if f"{arch}.{key}" not in metadata]
    if absent:
        own = "" if arch in ARCHITECTURES else f"; a plugin that knows {arch} may read its metadata in the hook model_config"
        raise CheckpointError(f"{card.path}: the metadata lacks {', '.join(absent)}{own}")
    tensors = frozenset(metadata.get("gguf.tensor_names", ()))
    class_name, model_type = ARCHITECTURES.get(arch, (arch, arch))
    config: dict[str, Any] = {name: metadata[f"{arch}.{key}"] for name, key in REQUIRED.items()}
    config.update({name: metadata[f"{arch}.{key}"] for name, key in OPTIONAL.items() if f"{arch}.{key}" in metadata})
    config.update({name: metadata[f"tokenizer.ggml.{name}"] for name in TOKEN_IDS if f"tokenizer.ggml.{name}" in metadata})
    if config.get("sliding_window") and arch == "llama":  # the converter writes Mistral as llama
        class_name, model_type = ARCHITECTURES["mistral"]
    config = {
        **config,
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": vocab_size(card, arch),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "rope_parameters": rope_parameters(metadata, arch),
    }
    return {**config, **gemma3_fields(config, metadata)} if arch == "gemma3" else config


def gemma3_fields(config: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 3 has of its own. Files do not say how scores are scaled: by the head size, but for the 27B model, known by its layers."""
    size_27b = config["num_hidden_layers"] == 62
    scalar = config["hidden_size"] // config["num_attention_heads"] if size_27b else config.get("head_dim")
    sliding = {"rope_type": "default", "rope_theta": metadata.get("gemma3.rope.freq_base_swa") or 10000.0}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window_pattern": metadata.get("gemma3.attention.sliding_window_pattern"),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": sliding},
    }


def vocab_size(card: ModelCard, arch: str) -> int:
    """Entries of the token list, which is as long as the embedding; without tokens, the size that the file states."""
    tokens = card.metadata.get("tokenizer.ggml.tokens")
    if tokens:
        return len(tokens)
    stated = card.metadata.get(f"{arch}.vocab_size")
    if stated is None:
        raise CheckpointError(f"{card.path}: the metadata has neither tokenizer.ggml.tokens nor {arch}.vocab_size")
    return int(stated)


def rope_parameters(metadata: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """The rotary fields, as transformers 5 writes them."""

    def entry(key: str) -> Any:
        return metadata.get(f"{arch}.rope.{key}")

    parameters: dict[str, Any] = {"rope_theta": entry("freq_base") or 10000.0, "rope_type": "default"}
    kind = entry("scaling.type")
    if kind not in (None, "none"):
        parameters["rope_type"] = kind
        optional = {
            "factor": entry("scaling.factor"),
            "original_max_position_embeddings": entry("scaling.original_context_length"),
            "attention_factor": entry("scaling.attn_factor"),
        }
        parameters.update({name: value for name, value in optional.items() if value is not None})
    return parameters
