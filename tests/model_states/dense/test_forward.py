"""The dense module apart from the engine: how checkpoints are read, dummy and new weights, cache groups, taps, int8."""

from __future__ import annotations

import json

import pytest
import torch

from modelrunner.checkpoint import DummyReader, SafetensorsReader
from modelrunner.errors import CheckpointError
from modelrunner.weights import load_weights
from tests.model_states.dense.variants import LLAMA3, LONGROPE, PHI3, VARIANTS

IDS = [(7 * i * i + 3 * i + 5) % 97 for i in range(40)]


def test_sharded_checkpoint(make_oracle, save, load):
    model = make_oracle("llama", tie_word_embeddings=True)
    folder = save(model, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(load(SafetensorsReader(folder, "tiny")).logits(IDS), want, rtol=1e-4, atol=1e-4)


def test_checkpoint_of_another_size_is_refused(make_oracle, save, load):
    """Biases that the configuration does not announce, and a wider MLP: each tensor is named, with both shapes."""
    folder = save(make_oracle("llama", attention_bias=True, num_hidden_layers=1))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_bias": False, "intermediate_size": 64}))
    with pytest.raises(CheckpointError) as error:
        load(SafetensorsReader(folder, "tiny"))
    message = str(error.value)
    assert "4 tensors not expected: " in message
    assert "model.layers.0.self_attn.q_proj.bias" in message
    assert "model.layers.0.mlp.up_proj.weight -> layers.0.mlp.gate_up: weight of part 1 has shape (48, 32); (64, 32) is needed" in message


@pytest.mark.parametrize("scheme", ["plain", "int8"])
def test_dummy_weights_then_real_ones_in_place(scheme, make_oracle, save, load):
    folder = save(make_oracle("llama", tie_word_embeddings=True))
    loaded = load(DummyReader(folder, "tiny"), scheme=scheme)
    noise = loaded.logits(IDS)
    assert torch.isfinite(noise).all()
    assert 0.1 < noise.std() < 10
    assert torch.equal(noise, load(DummyReader(folder, "tiny"), scheme=scheme).logits(IDS))
    places = {name: tensor.data_ptr() for name, tensor in loaded.state.module.state_dict().items()}
    reader = SafetensorsReader(folder, "tiny")
    load_weights(loaded.state.module, loaded.state.weight_map(loaded.card), reader, progress=False)
    assert {name: tensor.data_ptr() for name, tensor in loaded.state.module.state_dict().items()} == places
    assert torch.equal(loaded.logits(IDS), load(reader, scheme=scheme).logits(IDS))


def test_windows_make_two_cache_groups(make_oracle, save, load):
    model_type, fields = VARIANTS["qwen3, biases, layer types"]
    groups = {group.name: group for group in load(SafetensorsReader(save(make_oracle(model_type, **fields)), "tiny")).needs.cache_groups}
    assert {name: (group.layers, group.window) for name, group in groups.items()} == {"full": ((1,), None), "sliding": ((0, 2), 6)}


def test_longrope_is_short_while_requests_are(make_oracle, save, load):
    """Within the original context transformers takes the short set, and so do we when no request may be longer."""
    model = make_oracle("phi3", **{**PHI3, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64})
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0]
    reader = SafetensorsReader(save(model), "tiny")
    torch.testing.assert_close(load(reader, max_model_len=64).logits(IDS), want, rtol=1e-4, atol=1e-4)
    assert (load(reader, max_model_len=65).logits(IDS) - want).abs().max() > 0.1


def test_fused_projections_must_fit(make_oracle, save, load):
    """A fused tensor with rows to spare is refused, not cut."""
    folder = save(make_oracle("phi3", **PHI3))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1}))
    with pytest.raises(
        CheckpointError, match=r"qkv_proj.weight -> layers.0.attention.qkv: shape \(64, 32\) for all parts; 32 \+ 8 \+ 8 = 48 rows"
    ):
        load(SafetensorsReader(folder, "tiny"))


@pytest.mark.parametrize(
    "older",
    [
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_theta": 500.0, "rope_scaling": {name: value for name, value in LLAMA3.items() if name != "rope_theta"}},
    ],
    ids=["theta", "linear", "llama3"],
)
def test_older_spelling_of_rope(older, make_oracle, save, load):
    """Checkpoints written before transformers 5 have `rope_theta` and `rope_scaling`; the numbers are those of the newer spelling."""
    scaling = dict(older.get("rope_scaling", {}))
    newer = {"rope_theta": 500.0, "rope_type": scaling.pop("type", scaling.pop("rope_type", "default")), **scaling}
    model = make_oracle("llama", rope_parameters=newer)
    folder = save(model)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps({**config, **older, "torch_dtype": "float32"}))
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(load(SafetensorsReader(folder, "tiny")).logits(IDS), want, rtol=1e-4, atol=1e-4)


def test_taps_see_and_change_the_residual_stream(make_oracle, save, load):
    """`layer.i` is what transformers calls hidden state i; what a tap returns is what the following layers see."""
    model = make_oracle("llama")
    loaded = load(SafetensorsReader(save(model), "tiny"))
    seen: dict[str, torch.Tensor] = {}

    def look(name, hidden):
        seen[name] = hidden.clone()
        return hidden

    plain = loaded.logits(IDS, look)
    with torch.no_grad():
        want = model(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    assert tuple(seen) == loaded.needs.tap_points
    for layer in range(3):
        torch.testing.assert_close(seen[f"layer.{layer}"], want[layer][0], rtol=1e-4, atol=1e-4)
    unchanged = loaded.logits(IDS, lambda name, hidden: hidden.clone())
    torch.testing.assert_close(unchanged, plain)
    last = loaded.logits(IDS, lambda name, hidden: torch.ones_like(hidden) if name == "layer.3" else hidden)
    torch.testing.assert_close(last, last[:1].expand_as(last))  # every token's stream was replaced by the same


def test_int8_tied_and_untied_are_near_plain(make_oracle, save, load):
    for tied in (True, False):
        folder = save(make_oracle("llama", hidden_size=64, intermediate_size=96, tie_word_embeddings=tied))
        plain = load(SafetensorsReader(folder, "tiny")).logits(IDS)
        quantised = load(SafetensorsReader(folder, "tiny"), scheme="int8")
        error = (quantised.logits(IDS) - plain).norm() / plain.norm()
        assert 1e-4 < error < 0.05
        assert {parameter.dtype for name, parameter in quantised.state.module.named_buffers() if name.endswith("qweight")} == {torch.int8}
