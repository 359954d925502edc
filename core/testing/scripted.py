"""A model without weights: its logits are a given function of a token's position and id.

    plugin = ScriptedPlugin(say("abc", prompt_len=4))
    LLM("scripted", plugins=[plugin])

The plugin is one object that answers every hook that a model needs, so it also shows how small a model plugin can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelrunner.attention import BoundAttention
from modelrunner.batch import Batch
from modelrunner.checkpoint import CheckpointReader, ModelCard
from modelrunner.hookspecs import hookimpl
from modelrunner.model_state import BuildContext, FullAttention, ModelState, Needs, Tap
from modelrunner.offers import Offer
from modelrunner.settings import RunnerSettings
from modelrunner.testing.byte_tokenizer import EOS, ByteTokenizer
from modelrunner.text import Tokenizer
from modelrunner.weights import WeightMap

Script = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(positions [n] int64, ids [n] int64) of the tokens just read -> logits [n, vocab] float32 of the token that follows. Device work only."""

MODEL_NAME = "scripted"
PEAK = 50.0


def _resident(table: torch.Tensor) -> Callable[[torch.device], torch.Tensor]:
    """The table on a device, copied there once: a captured step must not copy from pageable memory."""
    copies: dict[torch.device, torch.Tensor] = {}

    def on(device: torch.device) -> torch.Tensor:
        if device not in copies:
            copies[device] = table.to(device)
        return copies[device]

    return on


def by_position(table: torch.Tensor) -> Script:
    """Logits `table[p]` for the token at position p; the last line serves every later position. table: [positions, vocab] float32."""
    resident = _resident(table)
    return lambda positions, ids: resident(positions.device)[positions.clamp(max=table.shape[0] - 1)]


def by_last(table: torch.Tensor) -> Script:
    """Logits `table[i]` after token id i. table: [vocab, vocab] float32."""
    resident = _resident(table)
    return lambda positions, ids: resident(positions.device)[ids]


def constant(logits: torch.Tensor) -> Script:
    """The same logits [vocab] everywhere."""
    return by_position(logits[None])


def say(ids: Sequence[int], prompt_len: int, vocab_size: int = 331) -> Script:
    """Greedy output `ids` after a prompt of `prompt_len` tokens, then end of sequence for ever."""
    table = torch.zeros(prompt_len + len(ids) + 1, vocab_size)
    for position, token in enumerate([*ids, EOS], start=prompt_len):
        table[position, token] = PEAK
    return by_position(table[1:])


def mixed(vocab_size: int = 331, avoid: Sequence[int] = (0, 1, EOS)) -> Script:
    """A greedy walk that depends on both position and last id and never takes an id of `avoid`."""
    allowed = [token for token in range(vocab_size) if token not in avoid]
    resident = _resident(torch.tensor(allowed))

    def script(positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        winner = resident(ids.device)[(ids * 31 + positions * 17 + 5) % len(allowed)]
        return nn.functional.one_hot(winner, vocab_size).float() * PEAK

    return script


class ScriptedState(ModelState):
    """Hidden state of a token = (its position, its id); exact in float32 below 2^24. `script` is set by the plugin's subclass."""

    script: Script

    def declare(self, card: ModelCard, settings: RunnerSettings) -> Needs:
        group = FullAttention(name="full", layers=(0,), num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0)
        config = card.config
        return Needs((group,), 2, config["vocab_size"], config["max_position_embeddings"])

    def weight_map(self, card: ModelCard) -> WeightMap:
        return WeightMap({})

    def build(self, ctx: BuildContext) -> nn.Module:
        return nn.Module()

    def embed(self, batch: Batch, out: torch.Tensor) -> None:
        out[:, 0] = batch.positions
        out[:, 1] = batch.input_ids

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: Mapping[str, BoundAttention],
        caches: Mapping[str, torch.Tensor],
        tap: Tap,
    ) -> torch.Tensor:
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return type(self).script(hidden[:, 0].long(), hidden[:, 1].long())


class ScriptedReader(CheckpointReader):
    """A checkpoint without tensors. `config` is set by the plugin's subclass."""

    config: Mapping[str, Any]

    def card(self) -> ModelCard:
        return ModelCard(self.name, self.path, "scripted", ("ScriptedForTests",), "scripted", self.config)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


class ScriptedPlugin:
    """Offers the model named `name`, whose logits are `script`'s. A plugin object for `Engine(plugins=[...])`."""

    MODELRUNNER_API = ">=1,<2"

    def __init__(
        self, script: Script, *, vocab_size: int = 331, context: int = 256, tokenizer: Tokenizer | None = None, name: str = MODEL_NAME
    ) -> None:
        config = {"vocab_size": vocab_size, "max_position_embeddings": context, "hidden_size": 2, "eos_token_id": EOS, "bos_token_id": 1}
        self.state = type("ScriptedState", (ScriptedState,), {"script": staticmethod(script)})
        self.reader = type("ScriptedReader", (ScriptedReader,), {"config": config})
        self.text = tokenizer or ByteTokenizer(vocab_size)
        self.name = name
        self.path = Path(f"/nowhere/{name}")

    @hookimpl
    def model_source(self, name: str) -> Offer[Path] | None:
        return Offer("scripted", lambda: self.path) if name == self.name else None

    @hookimpl
    def checkpoint_readers(self, path: Path) -> Offer[type[CheckpointReader]] | None:
        return Offer("scripted", lambda: self.reader) if path == self.path else None

    @hookimpl
    def model_config(self, card: ModelCard) -> Offer[Mapping[str, Any]] | None:
        return Offer("scripted", lambda: card.config) if card.model_type == "scripted" else None

    @hookimpl
    def tokenizer(self, card: ModelCard) -> Offer[Tokenizer] | None:
        return Offer("scripted", lambda: self.text) if card.path == self.path else None

    @hookimpl
    def model_state(self, card: ModelCard) -> Offer[type[ModelState]] | None:
        return Offer("scripted", lambda: self.state) if card.path == self.path else None
