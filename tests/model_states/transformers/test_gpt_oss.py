"""The conformance suite on gpt-oss: attention sinks, sliding and full layers in turn, experts; sinks large enough to matter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from modelrunner.testing.conformance import ModelStateConformance
from modelrunner.testing.conformance.lab import transformers_checkpoint
from tests.model_states.transformers.configs import config


class TestGptOss(ModelStateConformance):
    model_state = "transformers"

    def tiny_config(self) -> Mapping[str, Any]:
        return config("gpt_oss")

    def checkpoint(self, folder: Path, seed: int) -> None:
        transformers_checkpoint(self.tiny_config(), folder, seed)
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        sinks = [name for name in tensors if name.endswith("self_attn.sinks")]
        assert len(sinks) == 3
        save_file({**tensors, **{name: torch.tensor([-2.0, 0.0, 2.0, 4.0]) for name in sinks}}, file, metadata={"format": "pt"})
