"""Gemma 3 from GGUF files written here, through the engine against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelrunner import LLM, SamplingParams
from modelrunner.checkpoint import GGUFReader
from modelrunner.model_states.common.gguf import gguf_name
from modelrunner.model_states.gemma3.config import gemma3_config
from modelrunner.model_states.gemma3.weights import GGUF_NAMES
from modelrunner.plugins.gguf_config import gemma3_fields, gguf_config
from tests.model_states.dense.oracle import assert_greedy
from tests.model_states.gemma3.test_conformance import TINY

gguf = pytest.importorskip("gguf")
from gguf_files import begun, ended  # noqa: E402  needs gguf

# As files are: scores scaled by the head size, every sixth layer full.
FIELDS = {name: value for name, value in TINY.items() if name not in ("model_type", "sliding_window_pattern")}
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def write_file(path: Path, model: torch.nn.Module, config: Any) -> Path:
    """Write a transformers model as the converter does: norms with the one added, no head, no word of the other layers' positions."""
    writer = begun(path, "gemma3", config, 500.0)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            array = tensor.numpy() + (1.0 if "norm" in name else 0.0)
            writer.add_tensor(gguf_name(name, GGUF_NAMES), np.ascontiguousarray(array, np.float32))
    ended(writer)
    return path


def test_a_small_file_equals_transformers(tmp_path: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(**{**FIELDS, "num_hidden_layers": 7, "query_pre_attn_scalar": TINY["head_dim"], "rope_parameters": ROPES})
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    file = write_file(tmp_path / "model.gguf", model, config)
    llm = LLM(str(file), device="deferred_cpu", skip_tokenizer_init=True, num_gpu_blocks_override=64)
    prompts = [[(7 * i * i + 3 * i + k) % 97 for i in range(n)] for k, n in enumerate((1, 17, 40))]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    compared = [assert_greedy(model, p, o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)]
    assert sum(compared) >= 0.9 * 3 * 24
    card = GGUFReader(file, "small").card()
    assert gemma3_config(card.with_config(gguf_config(card))).windows == (*[6] * 5, None, 6)


def test_scores_of_the_27b_model_are_scaled_otherwise() -> None:
    """Sizes of the published models: 256 by the head size in the 4B, 5376 / 32 = 168 in the 27B, whose head size is 128."""
    rope = {"rope_parameters": {"rope_type": "default"}}
    small = {"hidden_size": 2560, "num_attention_heads": 8, "num_hidden_layers": 34, "head_dim": 256, **rope}
    large = {"hidden_size": 5376, "num_attention_heads": 32, "num_hidden_layers": 62, "head_dim": 128, **rope}
    assert [gemma3_fields(config, {})["query_pre_attn_scalar"] for config in (small, large)] == [256, 168]
