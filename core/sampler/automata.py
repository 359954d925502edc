"""Structured output by byte automata on the device: the mask of a row's state, and the way to its next one (see `automaton_arena`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from modelrunner.automaton import NO_STATE
from modelrunner.batch import Feature
from modelrunner.request_table import Column
from modelrunner.sampler.edits import EditStage

if TYPE_CHECKING:
    from modelrunner.automaton_arena import AutomatonArena
    from modelrunner.batch import Batch
    from modelrunner.ops import Ops
    from modelrunner.settings import RunnerSettings

STATE = "automaton_state"


class Automata(EditStage):
    """A row's state is the device's own: each sampled token moves it, so steps may follow each other without a word from the host. Which
    rows have one is settled when their grammar is compiled (see `guides`), not by their parameters.

    In a step with drafts each line has the state that the drafts ahead of it lead to, for its mask alone: the row's own state moves once it
    is known which of them are kept, so those that are not leave nothing behind."""

    feature = Feature.AUTOMATON
    argument = "automata"

    def __init__(self, arena: AutomatonArena) -> None:
        self._arena = arena

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        return (Column(STATE, torch.int32, default=NO_STATE),)

    def loading(self) -> Callable[[], None]:
        """What loading a grammar launches beside steps; for start-up, which gets it ready."""
        return self._arena.masking(0, 1)

    def given(self, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return columns[STATE], self._arena.masks

    def by_line(self, ops: Ops, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """D, captured. States of the lines of a step with drafts, [N] int32, and the masks that they number."""
        arena, places = self._arena, (batch.rows, batch.samples, batch.computed, batch.query_len)
        text = (arena.token_start, arena.token_bytes, arena.longest)
        ids, states, slots = batch.columns["token_ids"], batch.columns[STATE], 1 + batch.num_draft
        return ops.draft_states(*places, ids, slots, states, arena.edges, *text), arena.masks

    def walk(self, ops: Ops, batch: Batch, tokens: torch.Tensor, num_tokens: torch.Tensor, ok: torch.Tensor) -> torch.Tensor:
        """D, captured. Go on by the sampled tokens [N, 1 + k]. Returns after how many of them a row's output is complete, [N] int32."""
        arena, states = self._arena, batch.columns[STATE]
        text = (arena.token_start, arena.token_bytes, arena.longest, arena.stops)
        ends: torch.Tensor = ops.walk_tokens(batch.rows, batch.samples, ok, tokens, num_tokens, states, arena.edges, arena.closed, *text)
        return ends
