"""Tiny configurations of architectures that the fallback runs."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TINY_GPT: dict[str, Any] = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_inner": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {**TINY_GPT, "scale_attn_by_inverse_layer_idx": True},
    "gemma2": {
        **TINY,
        "head_dim": 12,
        "sliding_window": 6,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 10,
    },
    "qwen3_moe": {**TINY, "head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "mixtral": {**TINY, "num_local_experts": 4, "sliding_window": 6},
    "deepseek_v3": {
        **TINY,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "glm4_moe": {
        **TINY,
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,  # all, so that rounding cannot choose other ones
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
    "olmo2": {**TINY},
    "cohere": {**TINY, "logit_scale": 0.7, "use_qk_norm": True},
    "granite": {**TINY, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    "gpt_neox": {**TINY, "rotary_pct": 0.25},
    "gptj": {**TINY_GPT, "rotary_dim": 4},
    "opt": {**TINY, "ffn_dim": 48, "word_embed_proj_dim": 16},
    "gpt_bigcode": {**TINY_GPT, "multi_query": True},
    "starcoder2": {**TINY, "sliding_window": 6},
    "stablelm": {**TINY, "use_parallel_residual": True},
}


def config(model_type: str) -> dict[str, Any]:
    """The fields of a tiny `model_type`."""
    return {"model_type": model_type, **CONFIGS[model_type]}
