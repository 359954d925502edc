"""The conformance suite on gpt-oss: attention sinks, sliding and full layers in turn, experts; sinks large enough to matter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from modelrunner.testing.conformance import ModelStateConformance
from modelrunner.testing.conformance.lab import transformers_checkpoint

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_local_experts": 2,
    "num_experts_per_tok": 2,  # all, so that rounding cannot choose other ones
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
}


class TestGptOss(ModelStateConformance):
    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return GPT_OSS

    def checkpoint(self, folder: Path, seed: int) -> None:
        transformers_checkpoint(self.tiny_config(), folder, seed)
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        sinks = [name for name in tensors if name.endswith("self_attn.sinks")]
        assert len(sinks) == 3
        save_file({**tensors, **{name: torch.tensor([-2.0, 0.0, 2.0, 4.0]) for name in sinks}}, file, metadata={"format": "pt"})
