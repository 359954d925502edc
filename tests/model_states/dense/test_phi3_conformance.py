"""The conformance suite on Phi-3, whose checkpoints fuse projections and whose heads rotate in part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelrunner.testing.conformance import MatchesReference, ModelStateConformance

TINY = {
    "model_type": "phi3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}


class TestWindowAndPartialRotation(ModelStateConformance):
    model_state = "dense"

    def tiny_config(self) -> Mapping[str, Any]:
        return {**TINY, "sliding_window": 7, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.75}}


class TestLongRope(MatchesReference):
    """Every compared sequence is longer than the original context, so that transformers takes the long set too."""

    model_state = "dense"

    def tiny_config(self) -> Mapping[str, Any]:
        rope = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.5]}
        return {**TINY, "rope_parameters": rope, "original_max_position_embeddings": 16}
