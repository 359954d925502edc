"""The conformance suite on Gemma 3: in full with both cache groups, logits and tokens for every other variant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelrunner.testing.conformance import MatchesReference, ModelStateConformance

TINY = {
    "model_type": "gemma3_text",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "query_pre_attn_scalar": 10,
    "max_position_embeddings": 256,
    "sliding_window": 6,
    "sliding_window_pattern": 3,
    "initializer_range": 0.15,
}


class TestThreeSlidingOneFull(ModelStateConformance):
    """Pages of the two groups hold different numbers of tokens: 4 for the three sliding layers, 12 for the other."""

    model_state = "gemma3"

    def tiny_config(self) -> Mapping[str, Any]:
        return TINY


class TestScaledPositions(MatchesReference):
    """The 4B and larger models stretch the positions of the full layers by a factor; bases differ by layer type."""

    model_state = "gemma3"

    def tiny_config(self) -> Mapping[str, Any]:
        full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}
        return {**TINY, "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}}


class TestUntiedBiasedCapped(MatchesReference):
    """One key and value head, biases, a head of its own, capped logits; the first layer sees everything."""

    model_state = "gemma3"

    def tiny_config(self) -> Mapping[str, Any]:
        kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
        more = {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False, "final_logit_softcapping": 3.0}
        return {**TINY, **more, "layer_types": kinds}


class TestOnlySliding(MatchesReference):
    """Fewer layers than the pattern: there is no group `full`."""

    model_state = "gemma3"

    def tiny_config(self) -> Mapping[str, Any]:
        return {**TINY, "num_hidden_layers": 2}


class TestOnlyFull(MatchesReference):
    """A pattern of one: there is no group `sliding`."""

    model_state = "gemma3"

    def tiny_config(self) -> Mapping[str, Any]:
        return {**TINY, "sliding_window_pattern": 1}
