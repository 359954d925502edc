"""The conformance suite on transformers' own modules: in full on three that differ most, logits and tokens on the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelrunner.testing.conformance import MatchesReference, ModelStateConformance
from tests.model_states.transformers.configs import config


class TestGPT2(ModelStateConformance):
    """Learned positions, a tied head, one scale a layer: three cache groups."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return config("gpt2")


class TestGemma2(ModelStateConformance):
    """Sliding and full layers in turn, capped scores and logits, scaled embeddings."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return config("gemma2")


class TestQwen3Moe(ModelStateConformance):
    """Experts, which the checkpoint holds one by one and the module as one parameter."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return config("qwen3_moe")


class TestMixtral(MatchesReference):
    """Experts under other names in the checkpoint than in the module; every layer slides."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return config("mixtral")


class TestDeepseekV3(MatchesReference):
    """Keys of 20 components and values of 8; a buffer in the checkpoint; shared experts."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return config("deepseek_v3")


class TestGlm4Moe(MatchesReference):
    """Half of each head rotates; a dense layer before the experts."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return config("glm4_moe")


class TestOlmo2(MatchesReference):
    """Norms after attention and MLP instead of before."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return config("olmo2")


class TestCohere(MatchesReference):
    """Attention and MLP side by side, rotary pairs interleaved, scaled logits."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return config("cohere")


class TestGranite(MatchesReference):
    """Its own factors on embeddings, residuals, scores and logits."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return config("granite")


class TestGPTNeoX(MatchesReference):
    """Fused q, k, v; a quarter of each head rotates."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return config("gpt_neox")


class TestGPTJ(MatchesReference):
    """A table of positions that no checkpoint holds; a head with a bias."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return config("gptj")


class TestOPT(MatchesReference):
    """The decoder lies two levels deep; embeddings are smaller than hidden states; positions start at 2."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return config("opt")


class TestGPTBigCode(MatchesReference):
    """One key and value head for all query heads."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return config("gpt_bigcode")


class TestStarcoder2(MatchesReference):
    """Biases everywhere, and a window."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return config("starcoder2")


class TestStableLm(MatchesReference):
    """A class that does not declare that it takes attention functions, and does."""

    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return config("stablelm")
