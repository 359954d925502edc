"""modelrunner's conformance suite on OLMo 2; run it with the package installed."""

from modelrunner.testing.conformance import MatchesReference, ModelStateConformance

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = {"model_type": "olmo2", **SIZES, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15}


class TestOlmo2(ModelStateConformance):
    model_state = "olmo2"

    def tiny_config(self):
        return TINY


class TestTiedBiased(MatchesReference):
    model_state = "olmo2"

    def tiny_config(self):
        return {**TINY, "tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 4}
