"""The conformance suite on the dense family: in full where a path of the code is new, logits and tokens for every other variant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelrunner.testing.conformance import MatchesReference, ModelStateConformance
from tests.model_states.dense.variants import VARIANTS

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}
SLIDES = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


class TestLlama(ModelStateConformance):
    model_state = "dense"

    def tiny_config(self) -> Mapping[str, Any]:
        return {**TINY, "model_type": "llama"}


class TestMistralWindow(ModelStateConformance):
    model_state = "dense"

    def tiny_config(self) -> Mapping[str, Any]:
        return {**TINY, "model_type": "mistral", "sliding_window": 7, "head_dim": 12}


class TestQwen2Tied(ModelStateConformance):
    model_state = "dense"

    def tiny_config(self) -> Mapping[str, Any]:
        return {**TINY, "model_type": "qwen2", "tie_word_embeddings": True}


class TestQwen3TwoGroups(ModelStateConformance):
    model_state = "dense"

    def tiny_config(self) -> Mapping[str, Any]:
        return {**TINY, "model_type": "qwen3", "head_dim": 8, "attention_bias": True, **SLIDES}


def variant(name: str) -> type[MatchesReference]:
    """The test class of a variant."""
    model_type, fields = VARIANTS[name]

    class Variant(MatchesReference):
        model_state = "dense"

        def tiny_config(self) -> Mapping[str, Any]:
            return {**TINY, "model_type": model_type, **fields}

    return Variant


for _name in VARIANTS:
    globals()[f"Test: {_name}"] = variant(_name)
