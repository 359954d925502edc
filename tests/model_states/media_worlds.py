"""Tiny random multimodal models: written by transformers, and run by our states without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from modelrunner.attention import AttentionBackend, BoundAttention
from modelrunner.checkpoint import SafetensorsReader
from modelrunner.linear import LinearFactory, PlainScheme
from modelrunner.media import EncoderInput, Expanded, MediaBatch, MediaItem
from modelrunner.model_state import BuildContext, FullAttention
from modelrunner.offers import Offer
from modelrunner.ops import Ops, Registry
from modelrunner.plugins import hub, reference_kernels
from modelrunner.settings import load_settings
from modelrunner.weights import load_weights


def make_model(config: Mapping[str, Any], seed: int = 0) -> Any:
    """A transformers model in float32 whose norms and biases are noise too."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    fields = json.loads(json.dumps(config))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = AutoConfig.for_model(fields.pop("model_type"), **fields)
        model: Any = AutoModelForImageTextToText.from_config(made, attn_implementation="eager", dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def cpu_ops() -> Ops:
    registry = Registry()
    reference_kernels.kernels(registry.for_plugin("test"), SimpleNamespace(type="cpu"))
    return registry.resolve("cpu")


class Loaded:
    """Our state with the weights of a folder, without an engine."""

    def __init__(self, folder: Path, family: Any, tokenizer: Any) -> None:
        """family: the plugin module that offers the state."""
        reader = SafetensorsReader(folder, "tiny")
        self.settings = load_settings({"model": "tiny"}, sections={})
        card = reader.card()
        config = hub.model_config(card)
        assert isinstance(config, Offer)
        self.card = card.with_config(config.load())
        offer = family.model_state(self.card)
        assert isinstance(offer, Offer), offer
        self.state: Any = offer.load()(self.card, self.settings)
        self.needs = self.state.declare(self.card, self.settings)
        self.ops, device = cpu_ops(), torch.device("cpu")
        linear = LinearFactory(PlainScheme(self.ops, torch.float32, device))
        self.state.module = self.state.build(BuildContext(self.settings, self.card, self.ops, linear, torch.float32, device))
        load_weights(self.state.module, self.state.weight_map(self.card), reader, progress=False)
        self.processor: Any = self.state.media_processor(tokenizer)

    def encode(self, items: Sequence[MediaItem]) -> torch.Tensor:
        """[embeddings, width] of the items together."""
        given = [EncoderInput(item.kind, item.num_embeddings, item.tensors, json.loads(json.dumps(item.info))) for item in items]
        out = torch.full((sum(item.num_embeddings for item in items), self.needs.media.width(self.needs.hidden_size)), torch.nan)
        with torch.inference_mode():
            self.state.encode(given, out)
        return out

    def logits(self, prompt: Expanded, items: Sequence[MediaItem]) -> torch.Tensor:
        """[tokens, vocabulary] of a whole prompt at once."""
        count, width = len(prompt.token_ids), self.needs.hidden_size
        hidden, slots = torch.full((count, width), torch.nan), torch.full((count,), -1)
        starts = np.cumsum([0, *(item.num_embeddings for item in items)])
        for run in prompt.runs:
            slots[run.start : run.start + run.length] = torch.arange(run.length) + run.offset + int(starts[run.item])
        backends = [WholeSequence(group, self.ops) for group in self.needs.cache_groups]
        attention = {each.group.name: BoundAttention(each, {n: n for n in each.group.layers}, SimpleNamespace()) for each in backends}
        given = self.processor.positions(prompt, items) if items else None
        positions = torch.arange(count) if given is None else torch.from_numpy(given).long()
        media = MediaBatch(self.encode(items), slots) if items else None
        with torch.inference_mode():
            self.state.embed(SimpleNamespace(input_ids=torch.tensor(prompt.token_ids)), hidden)
            if media is not None:
                self.ops.place_media(hidden, media.arena, media.slots)
            return self.state.logits(self.state.forward(hidden, positions, attention, {}, lambda name, x: x, media=media))


class WholeSequence(AttentionBackend):
    """Attention for one sequence computed at once: causal."""

    def __init__(self, group: FullAttention, ops: Ops) -> None:
        super().__init__(group, torch.empty(0), ops, torch.float32)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, step: Any, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.group.scale, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


class SmallTokenizer:
    """A tokenizer of tests: `encode` is given, other text nobody asks for."""

    vocab_size = 97
    eos_token_ids = (2,)

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._encode(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"{token} " for token in ids)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        raise NotImplementedError("no chat in these tests")
