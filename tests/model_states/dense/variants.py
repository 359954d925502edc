"""Every architecture of the dense family, and every field that changes what it computes: (model type, fields of a tiny configuration)."""

from __future__ import annotations

from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}

# transformers takes the long set for a sequence longer than the original context, as all compared ones are.
LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.5]}
PHI3 = {"pad_token_id": 0}  # the default lies outside the tiny vocabulary

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, wide heads": ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.5}}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn, attention factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.4}}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 7, "head_dim": 12}),
    "phi3": ("phi3", PHI3),
    "phi3, window": ("phi3", {**PHI3, "sliding_window": 7, "tie_word_embeddings": True}),
    "phi3, rotates three quarters": ("phi3", {**PHI3, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.75}}),
    "phi3, longrope": ("phi3", {**PHI3, "rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, upper layers slide": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, biases, layer types": (
        "qwen3",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3, yarn": ("qwen3", {"head_dim": 16, "rope_parameters": YARN}),
}
