"""Runs a dense ModelState on one whole sequence, without an engine: attention is plain SDPA over that sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelrunner.attention import AttentionBackend, BoundAttention
from modelrunner.checkpoint import CheckpointReader, ModelCard
from modelrunner.linear import Int8Scheme, LinearFactory, PlainScheme
from modelrunner.model_state import BuildContext, FullAttention, ModelState
from modelrunner.model_states import dense
from modelrunner.offers import Offer
from modelrunner.ops import Ops, Registry
from modelrunner.plugins import hub, reference_kernels
from modelrunner.settings import load_settings
from modelrunner.weights import load_weights


def cpu_ops() -> Ops:
    registry = Registry()
    reference_kernels.kernels(registry.for_plugin("test"), SimpleNamespace(type="cpu"))
    return registry.resolve("cpu")


class WholeSequence(AttentionBackend):
    """Attention for one sequence computed at once: causal, within the group's window."""

    def __init__(self, group: FullAttention, ops: Ops) -> None:
        super().__init__(group, torch.empty(0), ops, torch.float32)
        self.layers: list[int] = []

    def bound(self) -> BoundAttention:
        return BoundAttention(self, {layer: layer for layer in self.group.layers}, SimpleNamespace())

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, step: Any, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.layers.append(layer)
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
        seen = (distance >= 0) & (distance < (self.group.window or len(q)))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=self.group.scale, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


class Loaded:
    """A dense model, loaded from a reader. `settings` are flat names, e.g. max_model_len."""

    def __init__(self, reader: CheckpointReader, scheme: str = "plain", **settings: Any) -> None:
        self.reader = reader
        self.settings = load_settings({"model": reader.name, **settings}, sections={})
        card = reader.card()
        config = hub.model_config(card)
        assert isinstance(config, Offer)
        self.card: ModelCard = card.with_config(config.load())
        offer = dense.model_state(self.card)
        assert isinstance(offer, Offer), offer
        self.state: ModelState = offer.load()(self.card, self.settings)
        self.needs = self.state.declare(self.card, self.settings)
        self.ops, device = cpu_ops(), torch.device("cpu")
        schemes = {"plain": PlainScheme, "int8": Int8Scheme}
        linear = LinearFactory(schemes[scheme](self.ops, torch.float32, device))
        self.state.module = self.state.build(BuildContext(self.settings, self.card, self.ops, linear, torch.float32, device))
        load_weights(self.state.module, self.state.weight_map(self.card), reader, progress=False)

    def logits(self, ids: list[int], tap: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, hidden: hidden) -> torch.Tensor:
        """[len(ids), vocab_size] logits of one sequence."""
        backends = [WholeSequence(group, self.ops) for group in self.needs.cache_groups]
        attention = {backend.group.name: backend.bound() for backend in backends}
        batch = SimpleNamespace(input_ids=torch.tensor(ids))
        hidden = torch.full((len(ids), self.needs.hidden_size), torch.nan, dtype=torch.float32)
        self.state.embed(batch, hidden)
        hidden = self.state.forward(hidden, torch.arange(len(ids)), attention, {}, tap)
        ran = sorted(layer for backend in backends for layer in backend.layers)
        assert ran == list(range(self.card.config["num_hidden_layers"]))
        return self.state.logits(hidden)


TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}


def oracle(model_type: str, **fields: Any) -> Any:
    """A tiny random transformers model in float32 whose norms and biases are noise too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**TINY, **fields}), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.float()


@pytest.fixture
def make_oracle() -> Callable[..., Any]:
    return oracle


@pytest.fixture
def load() -> type[Loaded]:
    return Loaded


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write a transformers model; returns its folder."""

    def write(model: Any, **how: Any) -> Path:
        folder = tmp_path / "checkpoint"
        model.save_pretrained(folder, **how)
        return folder

    return write
