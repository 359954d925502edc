"""The built-in plugins that find models, choose readers and state configurations."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest

from modelrunner.checkpoint import ModelCard
from modelrunner.errors import CheckpointError
from modelrunner.offers import Decline, Offer
from modelrunner.plugins import checkpoints, demo_model, hub, linear_schemes
from modelrunner.settings import load_settings


def settings(**fields):
    return load_settings(fields, sections={})


def offers(answers):
    """Name -> fit of the offers, and the reasons of the declines."""
    return {a.name: a.fit for a in answers if isinstance(a, Offer)}, [a.reason for a in answers if isinstance(a, Decline)]


@pytest.mark.parametrize(
    ("files", "want"),
    [
        (["config.json", "model.safetensors"], {"safetensors": "exact", "dummy": "fallback"}),
        (["config.json"], {"safetensors": "family", "dummy": "fallback"}),
        (["m.gguf"], {"gguf": "exact"}),
        (["config.json", "m.gguf"], {"safetensors": "family", "gguf": "exact", "dummy": "fallback"}),
        (["config.json", "m.gguf", "model.safetensors"], {"safetensors": "exact", "gguf": "family", "dummy": "fallback"}),
        (["m.gguf", "n.gguf"], {}),
        ([], {}),
    ],
)
def test_readers_of_a_folder(tmp_path, files, want):
    for file in files:
        (tmp_path / file).write_bytes(b"GGUF")
    found, reasons = offers(checkpoints.checkpoint_readers(tmp_path))
    assert found == want
    assert len(reasons) == 4 - len(want)


def test_readers_of_a_file(tmp_path):
    (tmp_path / "renamed.bin").write_bytes(b"GGUF....")
    assert offers(checkpoints.checkpoint_readers(tmp_path / "renamed.bin"))[0] == {"gguf": "exact"}
    (tmp_path / "config.json").write_text("{}")
    assert offers(checkpoints.checkpoint_readers(tmp_path / "config.json"))[0] == {"safetensors": "family", "dummy": "fallback"}


def test_torch_files_are_read_where_there_is_nothing_newer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert offers(checkpoints.checkpoint_readers(tmp_path))[0] == {"torch": "family", "dummy": "fallback"}
    assert "torch" in offers(checkpoints.checkpoint_readers(tmp_path / "pytorch_model.bin"))[0]
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert offers(checkpoints.checkpoint_readers(tmp_path))[0] == {"safetensors": "exact", "dummy": "fallback"}


def test_sources(tmp_path):
    assert hub.model_source("", settings()) == []
    local = hub.model_source(str(tmp_path), settings())
    assert offers(local)[0] == {"local": "exact"}
    assert local[0].load() == tmp_path
    assert offers(hub.model_source("org/model-1.5B", settings()))[0] == {"hub": "family"}
    assert "neither a file or folder here nor formed like a hub id" in offers(hub.model_source("no/such/folder", settings()))[1][0]


@pytest.mark.parametrize("name", ["./nothing", "../nothing", "/nothing", "~/nothing"])
def test_what_is_formed_like_a_path_is_not_looked_for_on_the_hub(name):
    """`./nothing` has the form of a hub id."""
    (offer,) = hub.model_source(name, settings())
    with pytest.raises(CheckpointError, match=r"^model '[^']+': no such file or folder \(/[^)]*nothing\)$"):
        offer.load()


def test_hub_without_a_connection_says_what_to_do(monkeypatch, tmp_path):
    def offline(name, **options):
        assert options["revision"] == "v2"
        raise ConnectionError("no route.\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    (offer,) = hub.model_source("org/model", settings(revision="v2"))
    with pytest.raises(CheckpointError, match=r"'org/model' at revision v2: no such file .* ConnectionError: no route\. Check the name"):
        offer.load()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path))
    assert offer.load() == tmp_path


def test_demo_model_present_or_absent(monkeypatch, tmp_path):
    assert demo_model.model_source("org/model") is None
    monkeypatch.setattr(demo_model, "PACKAGE", "no_such_package_here")
    answer = demo_model.model_source("")
    assert isinstance(answer, Decline)
    assert "make demo" in answer.reason
    assert "--model DIR" in answer.reason
    package = tmp_path / "pretend_weights"
    package.mkdir()
    # A package whose import fails: it must be found without being imported.
    (package / "__init__.py").write_text("raise ImportError('needs another package')")
    (package / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(demo_model, "PACKAGE", "pretend_weights")
    answer = demo_model.model_source("")
    assert isinstance(answer, Offer)
    assert answer.load() == package / "tiny.gguf"


def card(config, **fields):
    return ModelCard("m", Path("m"), "safetensors", ("X",), config.get("model_type", ""), config, **fields)


def test_configuration_gets_transformers_defaults():
    config = hub.model_config(card({"model_type": "qwen3", "hidden_size": 96, "rope_theta": 5e5, "num_key_value_heads": None})).load()
    assert (config["head_dim"], config["hidden_size"], config["num_key_value_heads"]) == (128, 96, None)
    assert config["rope_parameters"]["rope_theta"] == 5e5


def test_unknown_configuration_passes_through():
    config = {"model_type": "acme", "sizes": [1, 2]}
    assert hub.model_config(card(config)).load() == config
    assert isinstance(hub.model_config(card({})), Decline)


def test_gguf_configuration_of_an_unknown_architecture(tmp_path):
    sizes = {"embedding_length": 8, "feed_forward_length": 16, "block_count": 2, "attention.head_count": 2, "context_length": 64}
    metadata = {"general.architecture": "acme", "acme.vocab_size": 11, **{f"acme.{name}": value for name, value in sizes.items()}}
    gguf_card = ModelCard("m", tmp_path, "gguf", ("acme",), "acme", metadata=metadata)
    config = hub.model_config(gguf_card).load()
    assert config["architectures"] == ["acme"]
    assert (config["hidden_size"], config["vocab_size"], config["tie_word_embeddings"]) == (8, 11, True)
    short = ModelCard("m", tmp_path, "gguf", ("acme",), "acme", metadata={"general.architecture": "acme", "acme.block_count": 2})
    with pytest.raises(CheckpointError, match=r"lacks acme\.embedding_length, acme\.feed_forward_length.*hook model_config"):
        hub.model_config(short).load()


def test_linear_schemes():
    assert offers(linear_schemes.linear_scheme(card({"a": 1})))[0] == {"plain": "family", "int8": "fallback"}
    names = {offer.name: offer.load().name for offer in linear_schemes.linear_scheme(card({"a": 1}))}
    assert names == {"plain": "plain", "int8": "int8"}
    (answer,) = linear_schemes.linear_scheme(card(json.loads('{"a": 1}'), quantization={"quant_method": "gptq"}))
    assert "quantised (gptq)" in answer.reason
