"""Checkpoint readers: what they read, and how they refuse files that are missing, damaged or of another kind."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modelrunner.checkpoint import DummyReader, GGUFReader, ModelCard, SafetensorsReader
from modelrunner.errors import CheckpointError
from modelrunner.torch_file import TorchReader

CONFIG = {"architectures": ["SomethingForCausalLM"], "model_type": "something", "hidden_size": 4}


@pytest.fixture
def folder(tmp_path):
    """A folder with two shards, an index, a configuration and generation defaults."""
    tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}
    shards = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    for name, file in shards.items():
        save_file({name: tensors[name]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "other"}}))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    return tmp_path


def test_sharded_folder(folder):
    reader = SafetensorsReader(folder, "org/model")
    card = reader.card()
    assert (card.name, card.path, card.format) == ("org/model", folder, "safetensors")
    assert (card.architectures, card.model_type) == (("SomethingForCausalLM",), "something")
    assert card.quantization == {"quant_method": "other"}
    assert card.generation == {"temperature": 0.5}
    tensors = dict(reader.tensors())
    assert tensors["a.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["b.weight"].dtype == torch.bfloat16


def test_one_file_and_consolidated_twin(folder):
    """Mistral ships the same weights twice; the copy under the authors' own names is not read."""
    (folder / "model.safetensors.index.json").unlink()
    save_file({"other.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert sorted(name for name, _ in SafetensorsReader(folder, "m").tensors()) == ["a.weight", "b.weight"]
    one = SafetensorsReader(folder / "model-00001-of-00002.safetensors", "m")
    assert [name for name, _ in one.tensors()] == ["a.weight"]
    assert one.card().path == folder


def test_card_follows_the_settled_configuration(folder):
    card = SafetensorsReader(folder, "m").card().with_config({"architectures": ["Other"], "model_type": "other"})
    assert (card.architectures, card.model_type) == (("Other",), "other")
    assert card.quantization == {"quant_method": "other"}


def refuse(match, read):
    with pytest.raises(CheckpointError, match=match):
        read()


def test_missing_files_are_named(folder):
    reader = SafetensorsReader(folder, "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    refuse("names 1 of 2 files that are not there: model-00002-of-00002", lambda: list(reader.tensors()))
    (folder / "config.json").unlink()
    refuse(r"config\.json is missing", reader.card)


def test_folder_without_weights_says_what_it_found(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refuse(
        r"neither .* nor a \.safetensors file; found: config\.json\. `load_format=dummy`",
        lambda: list(SafetensorsReader(tmp_path, "m").tensors()),
    )


def test_shard_that_lacks_an_indexed_tensor(folder):
    save_file({"c.weight": torch.zeros(1)}, folder / "model-00002-of-00002.safetensors")
    refuse("lacks 1 tensors .*: b.weight", lambda: list(SafetensorsReader(folder, "m").tensors()))


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_truncated_safetensors(folder, keep):
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refuse(r"model-00001-of-00002\.safetensors cannot be read", lambda: list(SafetensorsReader(folder, "m").tensors()))


@pytest.mark.parametrize(
    ("text", "match"),
    [("{", "cannot be read"), ("[]", "holds a JSON list"), ('{"architectures": "Llama"}', "`architectures` is 'Llama'")],
)
def test_damaged_configuration(folder, text, match):
    (folder / "config.json").write_text(text)
    refuse(match, SafetensorsReader(folder, "m").card)


def test_dummy_reads_a_folder_or_a_file(folder):
    assert DummyReader(folder, "m").card().format == "dummy"
    other = folder / "tiny.json"
    other.write_text(json.dumps({**CONFIG, "hidden_size": 8}))
    reader = DummyReader(other, "m")
    assert reader.card().config["hidden_size"] == 8
    assert list(reader.tensors()) == []


def gguf_bytes(*, version=3, tensors=1, data=16):
    """A GGUF file by hand: one string entry, one list, and `tensors` float32 tensors [2, 2]."""

    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    out = b"GGUF" + struct.pack("<IQQ", version, tensors, 2)
    out += text("general.architecture") + struct.pack("<I", 8) + text("acme")
    out += text("acme.sizes") + struct.pack("<IIQ", 9, 4, 3) + struct.pack("<3I", 1, 2, 3)
    for index in range(tensors):
        out += text(f"t{index}") + struct.pack("<I2QIQ", 2, 3, 2, 0, 32 * index)
    out += b"\0" * (-len(out) % 32)
    return out + struct.pack("<6f", *range(6))[:data]


def test_gguf_of_an_unknown_architecture(tmp_path):
    """An unknown name passes through, for the plugin that knows it."""
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes(data=24))
    reader = GGUFReader(tmp_path, "m")
    card = reader.card()
    assert (card.path, card.format, card.architectures, card.model_type) == (file, "gguf", ("acme",), "acme")
    assert card.metadata["acme.sizes"] == [1, 2, 3]
    assert dict(reader.tensors())["t0"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_gguf_truncated_anywhere(tmp_path):
    """Wherever a file is cut, the error says so and names the file; nothing else is raised and no wrong number is read."""
    file = tmp_path / "m.gguf"
    whole = gguf_bytes(data=24)
    for keep in range(4, len(whole)):
        file.write_bytes(whole[:keep])
        with pytest.raises(CheckpointError, match=r"m\.gguf is truncated"):
            list(GGUFReader(file, "m").tensors())


def test_gguf_refusals(tmp_path):
    file = tmp_path / "m.gguf"
    refuse("cannot be read as GGUF", lambda: GGUFReader(file, "m").card())
    file.write_bytes(b"GGUX" + bytes(40))
    refuse("is not a GGUF file: it starts with b'GGUX'", lambda: GGUFReader(file, "m").card())
    file.write_bytes(gguf_bytes(version=1))
    refuse("GGUF version 1; versions 2 and 3", lambda: GGUFReader(file, "m").card())
    (tmp_path / "n.gguf").write_bytes(b"")
    refuse("holds 2 .gguf files", lambda: GGUFReader(tmp_path, "m").card())


def test_cards_need_no_torch(folder):
    (folder / "m.gguf").write_bytes(gguf_bytes())
    program = f"""
import sys
from pathlib import Path
from modelrunner.checkpoint import GGUFReader, SafetensorsReader
for reader in (SafetensorsReader, GGUFReader):
    assert reader(Path({str(folder)!r}), "m").card().architectures
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=120)


def test_a_card_prints_short() -> None:
    """Its metadata holds the whole vocabulary."""
    card = ModelCard("m", Path("m"), "gguf", ("X",), "x", config={"vocab": ["w"] * 1000}, metadata={"tokens": ["w"] * 1000})
    assert len(repr(card)) < 300


def test_names_without_tensors(folder):
    assert sorted(SafetensorsReader(folder, "m").names()) == ["a.weight", "b.weight"]
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="cannot be read"):
        list(SafetensorsReader(folder, "m").names())


@pytest.mark.parametrize("older", [False, True])
def test_torch_files(tmp_path, older):
    """Parts of pytorch_model, or a .pt file; of the older kind of file too, which cannot be mapped."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-1.bin", _use_new_zipfile_serialization=not older)
    torch.save({"b": torch.zeros(3)}, tmp_path / "pytorch_model-2.bin", _use_new_zipfile_serialization=not older)
    torch.save({"unused": torch.zeros(3)}, tmp_path / "other.pt")
    reader = TorchReader(tmp_path, "m")
    assert reader.card().format == "torch"
    assert [(name, tensor.tolist()) for name, tensor in reader.tensors()] == [("a", [1, 1]), ("b", [0, 0, 0])]
    assert list(reader.names()) == ["a", "b"]
    for part in tmp_path.glob("*.bin"):
        part.unlink()
    assert list(reader.names()) == ["unused"]


def test_torch_files_that_are_refused(tmp_path):
    reader = TorchReader(tmp_path, "m")
    with pytest.raises(CheckpointError, match=r"has neither pytorch_model\*\.bin nor a \.pt file"):
        list(reader.tensors())
    for content, message in (
        (b"damaged", "cannot be read"),
        ([torch.ones(1)], "holds a list; a dict of names and tensors"),
        (Path("x"), "read"),
    ):
        file = tmp_path / "pytorch_model.bin"
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            torch.save(content, file)
        with pytest.raises(CheckpointError, match=message):
            list(reader.tensors())
