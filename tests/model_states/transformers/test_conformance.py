"""The conformance suite on transformers' own modules: in full on three that differ most, logits and tokens on the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelrunner.testing.conformance import MatchesReference, ModelStateConformance

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


class TestGPT2(ModelStateConformance):
    """Learned positions, a tied head, one scale a layer: three cache groups."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return {"model_type": "gpt2", **TINY_GPT, "scale_attn_by_inverse_layer_idx": True}


class TestGemma2(ModelStateConformance):
    """Sliding and full layers in turn, capped scores and logits, scaled embeddings."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        capped = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 10}
        return {"model_type": "gemma2", **TINY, "head_dim": 12, "sliding_window": 6, **capped}


class TestQwen3Moe(ModelStateConformance):
    """Experts, which the checkpoint holds one by one and the module as one parameter."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
        return {"model_type": "qwen3_moe", **TINY, "head_dim": 12, **experts}


class TestMixtral(MatchesReference):
    """Experts under other names in the checkpoint than in the module; every layer slides."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return {"model_type": "mixtral", **TINY, "num_local_experts": 4, "sliding_window": 6}


class TestDeepseekV3(MatchesReference):
    """Keys of 20 components and values of 8; a buffer in the checkpoint; shared experts."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        heads = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12}
        experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24}
        return {"model_type": "deepseek_v3", **TINY, **heads, "v_head_dim": 8, **experts, "first_k_dense_replace": 1}


class TestGlm4Moe(MatchesReference):
    """Half of each head rotates; a dense layer before the experts."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
        return {"model_type": "glm4_moe", **TINY, "head_dim": 8, **experts}


class TestOlmo2(MatchesReference):
    """Norms after attention and MLP instead of before."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return {"model_type": "olmo2", **TINY}


class TestCohere(MatchesReference):
    """Attention and MLP side by side, rotary pairs interleaved, scaled logits."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return {"model_type": "cohere", **TINY, "logit_scale": 0.7, "use_qk_norm": True}


class TestGranite(MatchesReference):
    """Its own factors on embeddings, residuals, scores and logits."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 2.0}
        return {"model_type": "granite", **TINY, **factors}


class TestGPTNeoX(MatchesReference):
    """Fused q, k, v; a quarter of each head rotates."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return {"model_type": "gpt_neox", **TINY, "rotary_pct": 0.25}


class TestGPTJ(MatchesReference):
    """A table of positions that no checkpoint holds; a head with a bias."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return {"model_type": "gptj", **TINY_GPT, "rotary_dim": 4}


class TestOPT(MatchesReference):
    """The decoder lies two levels deep; embeddings are smaller than hidden states; positions start at 2."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return {"model_type": "opt", **TINY, "ffn_dim": 48, "word_embed_proj_dim": 16}


class TestGPTBigCode(MatchesReference):
    """One key and value head for all query heads."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return {"model_type": "gpt_bigcode", **TINY_GPT, "multi_query": True}


class TestStarcoder2(MatchesReference):
    """Biases everywhere, and a window."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return {"model_type": "starcoder2", **TINY, "sliding_window": 6}


class TestStableLm(MatchesReference):
    """A class that does not declare that it takes attention functions, and does."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return {"model_type": "stablelm", **TINY, "use_parallel_residual": True}
