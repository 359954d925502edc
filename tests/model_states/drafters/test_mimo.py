"""MiMo's layout: Qwen2's layers with biases, and a module for multi-token prediction in the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from modelrunner.checkpoint import SafetensorsReader
from modelrunner.model_states import mtp
from tests.model_states.dense.conftest import Loaded, oracle
from tests.model_states.drafters import oracle as papers
from tests.model_states.drafters.bench import Bench
from tests.model_states.drafters.heads import noise

IDS = [(7 * i * i + 3 * i + 5) % 97 for i in range(12)]


def test_target_and_module(tmp_path: Path) -> None:
    model = oracle("qwen2", rope_parameters={"rope_type": "default", "rope_theta": 640000.0})
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1, "attention_bias": True}
    config |= {"rope_theta": 640000.0, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    block, name = "model.layers.1.", "model.mtp_layers.0"
    module = {key.replace(block, f"{name}."): tensor.clone() for key, tensor in tensors.items() if key.startswith(block)}
    module[f"{name}.input_proj.weight"] = noise(1, 32, 64) / 8
    for i, norm in enumerate(("token_layernorm", "hidden_layernorm", "final_layernorm")):
        module[f"{name}.{norm}.weight"] = 1 + 0.1 * noise(i, 32)
    save_file(tensors | module, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with torch.no_grad():
        hidden = model(torch.tensor([IDS]), output_hidden_states=True)
    torch.testing.assert_close(Loaded(SafetensorsReader(tmp_path, "mimo")).logits(IDS), hidden.logits[0], rtol=1e-4, atol=1e-4)
    states, head = hidden.hidden_states[-1][0][:-1], model.lm_head.weight.detach()
    want = papers.propose(papers.mtp_head(module, config), lambda x: head @ x, model.get_input_embeddings().weight.detach(), IDS, states, 3)
    assert Bench(tmp_path, mtp, None).step(IDS, 0, IDS[:-1], states, {}, 3) == [token for token, _ in want]
