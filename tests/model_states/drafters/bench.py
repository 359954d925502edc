"""A drafter beside its target, without an engine: one row, whose steps the test writes down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from modelrunner.attention import AttentionBackend, BoundAttention
from modelrunner.checkpoint import ModelCard, SafetensorsReader
from modelrunner.linear import LinearFactory, PlainScheme
from modelrunner.model_state import BuildContext, FullAttention
from modelrunner.model_states import dense
from modelrunner.offers import Offer
from modelrunner.ops import Ops, Registry
from modelrunner.plugins import hub, reference_kernels
from modelrunner.settings import load_settings
from modelrunner.speculation import DraftBuild, Drafter, DraftPass, DraftStep, TargetModel
from modelrunner.weights import load_weights


@dataclass
class Queries:
    """What drafters read of a batch."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    media: None = None


class OneRow(AttentionBackend):
    """Attention of one row, whose keys and values are kept by position and may be written again."""

    def __init__(self, group: FullAttention, ops: Ops, length: int) -> None:
        super().__init__(group, torch.empty(0), ops, torch.float32)
        shape = (len(group.layers), length, group.num_kv_heads, group.head_dim)
        self.keys, self.values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)

    def bound(self, positions: torch.Tensor) -> BoundAttention:
        made = BoundAttention(self, {layer: i for i, layer in enumerate(self.group.layers)}, SimpleNamespace(positions=positions))
        made.begin()
        return made

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, step: Any, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.keys[layer][step.positions], self.values[layer][step.positions] = k, v
        seen = torch.arange(self.keys.shape[1]) <= step.positions[:, None]
        keys, values = (kept[layer].nan_to_num(0.0).transpose(0, 1)[None] for kept in (self.keys, self.values))
        assert not self.keys[layer][: int(step.positions.max()) + 1].isnan().any(), "a position was never written"
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, seen, scale=self.group.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)


def read_card(folder: Path) -> tuple[SafetensorsReader, ModelCard]:
    reader = SafetensorsReader(folder, folder.name)
    config = hub.model_config(reader.card())
    assert isinstance(config, Offer), config
    return reader, reader.card().with_config(config.load())


class Bench:
    """`target` and `drafter` loaded from folders; `step` runs a step of the row, whatever it holds, and returns the drafts."""

    def __init__(self, target: Path, plugin: ModuleType, folder: Path | None, length: int = 64) -> None:
        self.settings = load_settings({"model": str(target), "speculation.drafter": "x"}, sections={})
        registry = Registry()
        reference_kernels.kernels(registry.for_plugin("test"), SimpleNamespace(type="cpu"))
        self.ops = registry.resolve("cpu")
        self.target_reader, self.target_card = read_card(target)
        self.state = dense.load()(self.target_card, self.settings)
        needs = self.state.declare(self.target_card, self.settings)
        self.state.module = self.state.build(self.context(self.target_card))
        load_weights(self.state.module, self.state.weight_map(self.target_card), self.target_reader, progress=False)
        reader, card = (None, None) if folder is None else read_card(folder)
        model = TargetModel(
            self.target_card, needs.hidden_size, needs.vocab_size, needs.max_model_len, needs.tap_points, lambda card: dense.load()
        )
        offer = plugin.drafter(**{k: v for k, v in {"card": card, "target": model}.items() if k in plugin.drafter.__code__.co_varnames})
        assert isinstance(offer, Offer), offer
        self.drafter: Drafter = offer.load()(card, model, self.settings)
        self.needs = self.drafter.declare()
        build = DraftBuild(self.context(card or self.target_card), self.state, reader or self.target_reader, None, lambda: None)
        self.drafter.module = self.drafter.build(build)
        weight_map = self.drafter.weight_map()
        assert self.drafter.module is not None
        assert weight_map is not None
        load_weights(self.drafter.module, weight_map, reader or self.target_reader, progress=False)
        self.rows = {group.name: OneRow(group, self.ops, length) for group in self.needs.cache_groups}

    def context(self, card: ModelCard) -> BuildContext:
        device = torch.device("cpu")
        return BuildContext(
            self.settings, card, self.ops, LinearFactory(PlainScheme(self.ops, torch.float32, device)), torch.float32, device
        )

    def attention(self, positions: torch.Tensor) -> Mapping[str, BoundAttention]:
        return {name: row.bound(positions) for name, row in self.rows.items()}

    def step(
        self, known: Sequence[int], start: int, queries: Sequence[int], hidden: torch.Tensor, taps: Mapping[str, torch.Tensor], k: int
    ) -> list[int]:
        """A step from position `start` on, whose queries are the ids given, after which the row knows `known`.

        hidden, taps: [len(queries), H] of the target at the queries. Returns k drafts.
        """
        positions = start + torch.arange(len(queries))
        last = min(len(known) - 2, start + len(queries) - 1)
        following = torch.tensor([known[p + 1] if p + 1 < len(known) else 0 for p in positions.tolist()])

        def next_pass(number: int) -> DraftPass:
            place = torch.tensor([len(known) - 1 + number])
            return DraftPass(Queries(torch.zeros(1, dtype=torch.int64), place), self.attention(place))

        step = DraftStep(
            batch=Queries(torch.tensor(list(queries)), positions),
            num_draft=k,
            wants=torch.ones(1, dtype=torch.bool),
            known=torch.tensor([len(known)], dtype=torch.int32),
            newest=torch.tensor([known[-1]]),
            last_place=torch.tensor([last - start]),
            next_ids=following,
            positions=positions,
            hidden=hidden if self.needs.hidden else None,
            taps={point: taps[point] for point in self.needs.tap_points},
            attention=self.attention(positions),
            caches={},
            columns={},
            next_pass=next_pass,
        )
        out = torch.full((1, k), -1, dtype=torch.int32)
        with torch.inference_mode():
            self.drafter.propose(step, out, None)
        return out[0].tolist()
