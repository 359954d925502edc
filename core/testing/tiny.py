"""Tiny random checkpoints of known architectures, written once per process into a temporary folder."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from modelrunner.checkpoint import ModelCard
from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Offer
from modelrunner.testing.byte_tokenizer import BOS, EOS, ByteTokenizer
from modelrunner.text import Tokenizer

DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}
LOGIT_STD = 3.0


def _dense_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + f"self_attn.{name}_proj.weight": (rows, hidden) for name, rows in (("q", q), ("k", kv), ("v", kv))}
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q)
        shapes |= {prefix + f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {prefix + f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def dense_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random float32 weights. Projections keep their input's scale, q and k double theirs so that attention is not flat, and the head gives
    logits a standard deviation of about 3 (its input is normalised to mean square 1)."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in _dense_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            weights[name] = 1.0 + 0.1 * noise
        elif "embed" in name:
            weights[name] = noise
        else:
            gain = LOGIT_STD if "lm_head" in name else 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            weights[name] = noise * gain / shape[1] ** 0.5
    return weights


@lru_cache(maxsize=1)
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="modelrunner-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def tiny_dense(seed: int = 1, **config: Any) -> Path:
    """Folder of a tiny Llama: 2 layers, hidden size 64, 4 query and 2 KV heads, vocabulary 331, context 256 tokens.

    config: entries of config.json to change. It has no tokenizer files: run it with `plugins=[ByteTokenizerPlugin()]`.
    """
    from safetensors.torch import save_file

    full = DENSE | config
    name = "-".join([f"dense-{seed}", *(f"{key}={value}" for key, value in sorted(config.items()))])
    folder = _folder() / name
    if not folder.exists():
        folder.mkdir()
        save_file(dense_weights(full, seed), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(full, indent=1))
    return folder


class ByteTokenizerPlugin:
    """Supplies a `ByteTokenizer` to any model that it is loaded with."""

    MODELRUNNER_API = ">=1,<2"

    def __init__(self, text: Tokenizer | None = None) -> None:
        self.text = text

    @hookimpl
    def tokenizer(self, card: ModelCard) -> Offer[Tokenizer]:
        return Offer("bytes", lambda: self.text or ByteTokenizer(card.config["vocab_size"]), reason="a byte tokenizer for tests")
