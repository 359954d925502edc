"""What the fallback does not run, and that it says why; and that it never wins over a plugin that might be better."""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from modelrunner.checkpoint import ModelCard
from modelrunner.errors import PluginError, PluginWarning
from modelrunner.hookspecs import hookimpl
from modelrunner.model_states import transformers as plugin
from modelrunner.model_states.transformers.config import reason_against_architecture, reason_against_source, source_without_import
from modelrunner.model_states.transformers.probe import Mask, Unfit, follow
from modelrunner.offers import Decline, Offer
from modelrunner.plugin_manager import PluginManager
from modelrunner.settings import RunnerSettings, load_settings
from tests.model_states.transformers.configs import TINY


def card(model_type: str, architecture: str, **fields: Any) -> ModelCard:
    """The card of a configuration in which `fields` replace those of transformers' defaults."""
    config = CONFIG_MAPPING[model_type](**fields).to_dict() if model_type in CONFIG_MAPPING else fields
    config |= {"architectures": [architecture], "model_type": model_type}
    return ModelCard("tiny", Path("tiny"), "safetensors", (architecture,), model_type, config)


def settings(**arguments: Any) -> RunnerSettings:
    return load_settings(arguments, sections=())


OLMO2 = card("olmo2", "Olmo2ForCausalLM", **TINY)


def reason(answer: Offer[Any] | Decline) -> str:
    assert isinstance(answer, Decline), answer
    return answer.reason


@pytest.mark.parametrize(
    ("model_type", "architecture", "why"),
    [
        ("mamba", "MambaForCausalLM", "recurrent state"),
        ("jamba", "JambaForCausalLM", "recurrent state"),
        ("falcon_h1", "FalconH1ForCausalLM", "recurrent state"),
        ("qwen3_next", "Qwen3NextForCausalLM", "layers of type linear_attention"),
        ("lfm2", "Lfm2ForCausalLM", "layers of type conv|recurrent state"),
        ("llama4_text", "Llama4ForCausalLM", "layers of type chunked_attention"),
        ("falcon", "FalconForCausalLM", "takes no function from outside"),
        ("bloom", "BloomForCausalLM", "takes no function from outside"),
        ("t5", "T5ForConditionalGeneration", "encoder-decoder"),
        ("bart", "BartForCausalLM", "encoder-decoder"),
        ("llama", "LlamaForSequenceClassification", "not transformers' causal decoder .*LlamaForCausalLM"),
        ("clip", "CLIPModel", "it has none"),
        ("orchid", "OrchidForCausalLM", "does not know model_type 'orchid'"),
    ],
)
def test_architectures_that_are_declined(model_type: str, architecture: str, why: str) -> None:
    answer = plugin.model_state(card(model_type, architecture), settings())
    assert architecture in reason(answer) or "does not know" in reason(answer)
    assert re.search(why, reason(answer)), reason(answer)


def test_what_is_declined_of_an_architecture_that_runs() -> None:
    offer = plugin.model_state(OLMO2, settings())
    assert isinstance(offer, Offer)
    assert (offer.name, offer.fit) == ("transformers", "fallback")
    assert "linear.scheme is 'int8'" in reason(plugin.model_state(OLMO2, settings(linear={"scheme": "int8"})))
    assert "linear.scheme is 'mine'" in reason(plugin.model_state(OLMO2, settings(pin={"linear_scheme": "mine"})))
    assert "GGUF" in reason(plugin.model_state(replace(OLMO2, format="gguf"), settings()))
    assert "quantised (awq)" in reason(plugin.model_state(replace(OLMO2, quantization={"quant_method": "awq"}), settings()))
    assert "names no architecture" in reason(plugin.model_state(replace(OLMO2, architectures=()), settings()))


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LONGROPE |= {"original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("model_type", "architecture", "fields", "why"),
    [
        (
            "llama",
            "LlamaForCausalLM",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            r"\(dynamic\) stretches",
        ),
        ("phi3", "Phi3ForCausalLM", {"rope_parameters": LONGROPE}, r"\(longrope\) stretches"),
        ("llama", "LlamaForCausalLM", {"is_causal": False}, "looks at later tokens"),
        ("doge", "DogeForCausalLM", {}, "without data its forward fails"),
    ],
)
def test_what_only_a_look_at_the_model_shows(model_type: str, architecture: str, fields: dict[str, Any], why: str) -> None:
    config = CONFIG_MAPPING[model_type](**TINY, **fields)
    with pytest.raises(Unfit, match=why):
        follow(architecture, config, 128)


def test_windows_are_read_off_masks() -> None:
    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query

    def sliding(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key > query - 7)

    def chunked(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key // 7 == query // 7)

    def padded(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return torch.ones(1, 5, dtype=torch.bool, device="meta")[batch, key]

    assert Mask(causal).window("Layer", 100) is None
    assert Mask(sliding).window("Layer", 100) == 7
    assert Mask(sliding).window("Layer", 7) is None
    with pytest.raises(Unfit, match="Layer has a mask that is neither"):
        Mask(chunked).window("Layer", 100)
    with pytest.raises(Unfit, match="depends on data"):
        Mask(padded).window("Layer", 100)


class Broken:
    @hookimpl
    def model_state(self) -> None:
        raise RuntimeError("half installed")


def chosen(of: ModelCard, *plugins: object, pin: str | None = None) -> str:
    choice: Any = PluginManager.load(plugins, {}).choose("model_state", pin=pin, card=of, settings=settings())
    return str(choice.offer.name)


def test_a_fallback_wins_only_when_nothing_else_could() -> None:
    assert chosen(OLMO2) == "transformers"
    assert chosen(card("llama", "LlamaForCausalLM", **TINY)) == "dense"
    assert chosen(card("llama", "LlamaForCausalLM", **TINY), pin="transformers") == "transformers"
    with pytest.raises(PluginError, match="Only the fallback 'transformers' fits"):
        chosen(OLMO2, Broken())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        assert chosen(OLMO2, Broken(), pin="transformers") == "transformers"


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("llama", "LlamaForCausalLM"), ("olmo2", "Olmo2ForCausalLM"), ("mamba", "MambaForCausalLM"), ("bloom", "BloomForCausalLM")],
)
def test_files_say_what_the_imported_lists_say(monkeypatch: pytest.MonkeyPatch, model_type: str, architecture: str) -> None:
    asked = card(model_type, architecture)
    want = reason_against_architecture(asked)
    assert source_without_import(asked) is None, "transformers has been imported"
    monkeypatch.delitem(sys.modules, "transformers")
    source = source_without_import(asked)
    assert source is not None
    assert reason_against_source(asked, source) == want


@pytest.mark.parametrize(
    ("model_type", "architecture"), [("llama", "LlamaForSequenceClassification"), ("clip", "CLIPModel"), ("orchid", "")]
)
def test_what_files_do_not_plainly_say_is_looked_up(monkeypatch: pytest.MonkeyPatch, model_type: str, architecture: str) -> None:
    asked = card(model_type, architecture)
    monkeypatch.delitem(sys.modules, "transformers")
    assert source_without_import(asked) is None
