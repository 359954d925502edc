"""A plugin's own family from a GGUF file whose architecture is not built in: names are translated by the plugin, and not by luck."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from modelrunner import LLM, Decline, Offer, SamplingParams, hookimpl
from modelrunner.checkpoint import ModelCard
from modelrunner.errors import CheckpointError
from modelrunner.model_states.common.gguf import gguf_name
from modelrunner.model_states.dense.state import DenseState
from modelrunner.testing import ByteTokenizerPlugin, tiny_dense
from modelrunner.testing.tiny import DENSE
from modelrunner.weights import WeightMap

gguf = pytest.importorskip("gguf")
OWN = {"post_attention_layernorm": "ffn_own_norm"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Untranslated(DenseState):
    def weight_map(self, card: ModelCard) -> WeightMap:
        return super().weight_map(replace(card, format="safetensors"))


class Translated(Untranslated):
    def weight_map(self, card: ModelCard) -> WeightMap:
        return WeightMap({gguf_name(name, OWN): targets for name, targets in super().weight_map(card).names.items()})


class Acme:
    """Bids for the file's own word."""

    MODELRUNNER_API = ">=1,<2"

    def __init__(self, state: type[DenseState]) -> None:
        self.state = state

    @hookimpl
    def model_state(self, card: ModelCard) -> Offer[type[DenseState]] | Decline:
        return Offer("acme", lambda: self.state) if "acme" in card.architectures else Decline("only acme")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny dense checkpoint as GGUF, under the architecture acme."""
    path = tmp_path_factory.mktemp("acme") / "acme.gguf"
    writer = gguf.GGUFWriter(path, "acme")
    writer.add_context_length(DENSE["max_position_embeddings"])
    writer.add_embedding_length(DENSE["hidden_size"])
    writer.add_block_count(DENSE["num_hidden_layers"])
    writer.add_feed_forward_length(DENSE["intermediate_size"])
    writer.add_head_count(DENSE["num_attention_heads"])
    writer.add_head_count_kv(DENSE["num_key_value_heads"])
    writer.add_key_length(DENSE["head_dim"])
    writer.add_layer_norm_rms_eps(DENSE["rms_norm_eps"])
    writer.add_rope_freq_base(DENSE["rope_theta"])
    writer.add_vocab_size(DENSE["vocab_size"])
    for name, tensor in load_file(next(tiny_dense().glob("*.safetensors"))).items():
        writer.add_tensor(gguf_name(name, OWN), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def run(model: Path, *plugins: Any) -> list[int]:
    with LLM(str(model), plugins=[ByteTokenizerPlugin(), *plugins], device="cpu", cache={"num_pages": 16}) as llm:
        return list(llm.generate([[1, 40, 50, 60]], GREEDY)[0].outputs[0].token_ids)


def test_it_runs_as_from_safetensors(file: Path) -> None:
    assert run(file, Acme(Translated)) == run(tiny_dense())


def test_a_map_that_was_not_translated_is_told_how(file: Path) -> None:
    with pytest.raises(CheckpointError, match="None of its names is in the model's weight map") as caught:
        run(file, Acme(Untranslated))
    assert "and the checkpoint 'output.weight': GGUF files have names of their own" in str(caught.value)
    assert "docs/layers.md, `GGUF files`" in str(caught.value)


def test_a_plugin_may_read_the_metadata_itself(file: Path) -> None:
    """Its answer wins over the built-in translation, which is a guess for an architecture that is not built in."""

    class Sized(Acme):
        @hookimpl
        def model_config(self, card: ModelCard) -> Offer[Any]:
            return Offer("acme", lambda: {**DENSE, "architectures": ["acme"]})

    assert run(file, Sized(Translated)) == run(tiny_dense())


@pytest.mark.parametrize("name", ["model.layers.0.mixer.in_proj.weight", "model.embeddings.weight", "model.layers.x.mlp.up_proj.weight"])
def test_a_name_that_is_not_known_is_told(name: str) -> None:
    with pytest.raises(ValueError, match=r"no GGUF name is known for .*mlp\.up_proj.*model\.embed_tokens.*`own`"):
        gguf_name(name)
