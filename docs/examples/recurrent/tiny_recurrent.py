"""A random tiny checkpoint of the example's model, and the model itself as a plain recurrence over one sequence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["TinyRecurrentForCausalLM"],
    "model_type": "tiny_recurrent",
    "vocab_size": 331,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "snapshot_interval": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_checkpoint(folder: Path, seed: int, **config: Any) -> None:
    """Write config.json and random float32 weights. config: entries to change."""
    full = CONFIG | config
    hidden, vocab, generator = full["hidden_size"], full["vocab_size"], torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocab, hidden), "norm": (hidden,), "head": (vocab, hidden)}
    for layer in range(full["num_hidden_layers"]):
        mixer = {"inputs": (4 * hidden, hidden), "norm": (hidden // full["num_attention_heads"],)}
        mixer = mixer if layer % 2 == 0 else {"qkv": (3 * hidden, hidden)}
        shapes |= {f"layers.{layer}.mixer.{name}": shape for name, shape in mixer.items()}
        shapes |= {f"layers.{layer}.mixer.output": (hidden, hidden), f"layers.{layer}.mlp.gate_up": (4 * hidden, hidden)}
        shapes |= {f"layers.{layer}.mlp.down": (hidden, 2 * hidden)}
        shapes |= {f"layers.{layer}.{name}": (hidden,) for name in ("mixer_norm", "mlp_norm")}
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        gain = {"embed": hidden**0.5, "head": 3.0}.get(name, 1.5)  # logits of a standard deviation of 3
        weights[f"{name}.weight"] = 1 + 0.1 * noise if len(shape) == 1 else noise * gain / shape[1] ** 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(full, indent=1), encoding="utf-8")


class Recurrence:
    """`Recurrence(folder)(ids)` -> logits [length, vocabulary] float32, a token at a time, with nothing of modelrunner's."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.weights = load_file(folder / "model.safetensors")
        self.heads = self.config["num_attention_heads"]

    def __call__(self, ids: Sequence[int]) -> Tensor:
        x = self.weights["embed.weight"][torch.tensor(list(ids))]
        for layer in range(self.config["num_hidden_layers"]):
            mixer = self.recurrent if layer % 2 == 0 else self.full
            x = x + mixer(self.norm(x, f"layers.{layer}.mixer_norm"), f"layers.{layer}.mixer")
            gate, up = self.linear(self.norm(x, f"layers.{layer}.mlp_norm"), f"layers.{layer}.mlp.gate_up").chunk(2, -1)
            x = x + self.linear(torch.nn.functional.silu(gate) * up, f"layers.{layer}.mlp.down")
        return self.linear(self.norm(x, "norm"), "head")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weights[f"{name}.weight"]

    def recurrent(self, x: Tensor, name: str) -> Tensor:
        parts = self.linear(x, f"{name}.inputs").unflatten(-1, (4, self.heads, -1))  # [length, 4, heads, size]
        state, out = torch.zeros(self.heads, parts.shape[-1], parts.shape[-1]), []
        for q, k, v, gate in parts:
            state = torch.sigmoid(gate)[:, :, None] ** (1 / 16) * state + k[:, :, None] * v[:, None, :]
            out.append((q[:, None, :] @ state).squeeze(1))
        return self.linear(self.norm(torch.stack(out), f"{name}.norm").flatten(1), f"{name}.output")

    def full(self, x: Tensor, name: str) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(0, 1) for part in self.linear(x, f"{name}.qkv").chunk(3, -1))
        attended = torch.nn.functional.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.linear(attended.transpose(0, 1).flatten(1), f"{name}.output")

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary positions: pairs (i, i + size / 2) of [heads, length, size] turn by position * theta ** (-2 i / size)."""
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[1])[:, None] * self.config["rope_theta"] ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
