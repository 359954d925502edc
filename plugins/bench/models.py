"""Configurations of models that are measured with made-up weights, by name. Torch-free until weights are written."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
MODELS: dict[str, Mapping[str, Any]] = {
    "qwen3-0.6b": QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28, "tie_word_embeddings": True},
    "qwen3-8b": QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36, "tie_word_embeddings": False},
    "tiny": QWEN3
    | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
        "vocab_size": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    },
}
STORED = ("tiny",)  # models whose made-up weights are written into a file, which other engines read as well


@lru_cache(maxsize=1)
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="modelrunner-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def model_folder(name: str) -> Path:
    """A folder with the config.json of a named model, of this process. Load it with `load_format=dummy`, or see `write_weights`."""
    folder = _folder() / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name], indent=1))
    return folder


def write_weights(folder: Path) -> None:
    """Put random weights beside the config.json of a Qwen3 with tied embeddings, once: `model.safetensors`, a few hundred KB for `tiny`."""
    if (folder / "model.safetensors").exists():
        return
    import torch
    from safetensors.torch import save_file

    from modelrunner.testing.tiny import dense_weights

    config = json.loads((folder / "config.json").read_text())
    weights = dense_weights(config, seed=0)
    del weights["lm_head.weight"]
    for layer in range(config["num_hidden_layers"]):
        for name in ("q_norm", "k_norm"):
            weights[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.ones(config["head_dim"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
