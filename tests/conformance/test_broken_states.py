"""The ModelState suite finds each of a collection of broken states, by the test that is about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelrunner.model_state import ModelState, No, StaticBuffer, Yes
from modelrunner.model_states.dense.state import DenseState
from modelrunner.request_table import Column
from modelrunner.testing.conformance import ModelStateConformance

TINY = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}


class WrongRope(DenseState):
    """Two tokens share each position."""

    def positions(self, batch, out):
        return out // 2


class ScalesLogits(DenseState):
    def logits(self, hidden):
        return super().logits(hidden) * 1.01


class ChunkPositions(DenseState):
    """Counts positions from the start of the chunk."""

    def positions(self, batch, out):
        return out - batch.computed[batch.token_row].clamp(min=0) // 3


class MixesRows(DenseState):
    def forward(self, hidden, positions, attention, caches, tap):
        return super().forward(hidden + hidden.mean(0, keepdim=True) * 0.05, positions, attention, caches, tap)


class StrayPage(DenseState):
    def forward(self, hidden, positions, attention, caches, tap):
        next(iter(caches.values()))[200, 0, 0] = 1.0
        return super().forward(hidden, positions, attention, caches, tap)


class NullPage(DenseState):
    """Padding tokens land on the null page."""

    def forward(self, hidden, positions, attention, caches, tap):
        out = super().forward(hidden, positions, attention, caches, tap)
        next(iter(caches.values()))[0, 0, 0] = hidden[-1, 0]
        return out


class StraySlot(DenseState):
    """Writes into its own page, but behind the token."""

    def before_forward(self, batch):
        self.batch = batch

    def forward(self, hidden, positions, attention, caches, tap):
        out = super().forward(hidden, positions, attention, caches, tap)
        cache = next(iter(caches.values()))
        slot = self.batch.slots["full"][0].clamp(min=0)
        cache[slot // 4, 0, 3 - slot % 4] = 0.0
        return out


class OverDeclares(DenseState):
    """A cache layer that nobody writes."""

    def declare(self, card, settings):
        needs = super().declare(card, settings)
        group = needs.cache_groups[0]
        object.__setattr__(group, "layers", (*group.layers, len(group.layers)))
        return needs


class ForeignColumn(DenseState):
    def before_forward(self, batch):
        batch.columns["limit"].add_(1)


class NeighboursColumn(DenseState):
    """Counts steps in every row, not only in its own."""

    def declare(self, card, settings):
        return replace(super().declare(card, settings), columns=(Column("steps", torch.int32),))

    def before_forward(self, batch):
        batch.columns["steps"].add_(1)


class UnwrittenBuffer(DenseState):
    """Reads a buffer that nothing filled, and that happens to hold zeros."""

    def declare(self, card, settings):
        return replace(super().declare(card, settings), buffers=(StaticBuffer("bias", ("tokens", 32), torch.float32),))

    def before_forward(self, batch):
        self.bias = batch.buffers["bias"]

    def forward(self, hidden, positions, attention, caches, tap):
        return super().forward(hidden + self.bias[: len(hidden)], positions, attention, caches, tap)


class Unembedded(DenseState):
    """Leaves the embedding of token 0 unwritten, where the buffer happens to hold zeros."""

    def embed(self, batch, out):
        whole = torch.empty_like(out)
        super().embed(batch, whole)
        out[1:] = whole[1:]


class AsksForAValue(DenseState):
    def before_forward(self, batch):
        if batch.samples.any():
            self.sampled = True


class AsksForTheLastPosition(DenseState):
    def forward(self, hidden, positions, attention, caches, tap):
        self.top = positions.max().item()
        return super().forward(hidden, positions, attention, caches, tap)


class CountsOnTheHost(DenseState):
    def forward(self, hidden, positions, attention, caches, tap):
        top = int(positions.max())
        return super().forward(hidden, positions.clamp(max=top), attention, caches, tap)


class FindsWhere(DenseState):
    """Places that hold something, by an operation made of another whose shape depends on data."""

    def logits(self, hidden):
        self.places = torch.argwhere(hidden[:, 0] > 0)
        return super().logits(hidden)


class ShapeFromData(DenseState):
    def before_forward(self, batch):
        self.valid = batch.positions[batch.token_valid]


class CopiesToTheHost(DenseState):
    def before_forward(self, batch):
        self.ids = batch.input_ids.tolist()


class Float32Logits(DenseState):
    def logits(self, hidden):
        return super().logits(hidden).float()


class KeepsAnOldCopy(DenseState):
    """A copy of a weight that a reload does not reach."""

    def logits(self, hidden):
        if not hasattr(self, "copy"):
            self.copy = self.module.head.weight.clone()
        return hidden @ self.copy.T


class RemembersRows(DenseState):
    """Keeps state per row outside the cache: a resumed request, or one with cached pages, finds another's."""

    def declare(self, card, settings):
        self.sums = torch.zeros(16, 32)
        return super().declare(card, settings)

    def before_forward(self, batch):
        self.batch = batch

    def forward(self, hidden, positions, attention, caches, tap):
        rows = self.batch.rows[self.batch.token_row].long()
        self.sums.index_add_(0, rows, hidden * self.batch.token_valid[:, None])
        return super().forward(hidden + 0.02 * self.sums[rows], positions, attention, caches, tap)


class SilentTap(DenseState):
    """Silent in steps with prompts; a start finds one that always is."""

    def forward(self, hidden, positions, attention, caches, tap):
        def call(name, x):
            return x if name == "layer.1" and len(x) > 1 else tap(name, x)

        return super().forward(hidden, positions, attention, caches, call)


class DeafTap(DenseState):
    def forward(self, hidden, positions, attention, caches, tap):
        def look(name, x):
            tap(name, x)
            return x

        return super().forward(hidden, positions, attention, caches, look)


class RefusesWithoutReason(DenseState):
    def supports(self, feature):
        return No("") if feature == "graphs" else super().supports(feature)


class ShortTable(DenseState):
    """Works until the last position of the context."""

    @property
    def table_length(self):
        return super().table_length - 1

    def forward(self, hidden, positions, attention, caches, tap):
        return super().forward(hidden, positions.clamp(max=self.table_length - 3), attention, caches, tap)


# What the report must say, and the tests that must fail; others may.
FOUND_BY: dict[type[ModelState], tuple[str, tuple[str, ...]]] = {
    WrongRope: (r"logits of prompt \d|the reference has", ("test_logits_equal_the_reference", "test_greedy_tokens_equal_the_reference")),
    ScalesLogits: (r"logits of prompt \d differ first at position 0, and at (\d+) of \1 positions", ("test_logits_equal_the_reference",)),
    ChunkPositions: (r"run plainly \(alone, whole", ("test_chunks",)),
    MixesRows: (r"run plainly \(alone, whole", ("test_batch", "test_depth", "test_chunks", "test_padding_changes_nothing")),
    StrayPage: (r"cache pages \[200\] changed", ("test_touches_what_it_declares",)),
    NullPage: (r"cache pages \[0\] changed", ("test_touches_what_it_declares",)),
    StraySlot: ("changed, which are not at the step's slots", ("test_touches_what_it_declares",)),
    OverDeclares: (r"group 'full' declares layers \[2\]", ("test_touches_what_it_declares",)),
    ForeignColumn: ("column 'limit', which the state does not own, changed", ("test_touches_what_it_declares",)),
    NeighboursColumn: ("column 'steps' changed in rows that have no token", ("test_touches_what_it_declares",)),
    UnwrittenBuffer: ("read that nobody has written", ("test_touches_what_it_declares",)),
    Unembedded: ("read that nobody has written", ("test_touches_what_it_declares",)),
    AsksForAValue: ("is_nonzero reads a tensor's value", ("test_steps_ask_for_no_values",)),
    AsksForTheLastPosition: ("_local_scalar_dense reads a tensor's value", ("test_steps_ask_for_no_values",)),
    CountsOnTheHost: ("_local_scalar_dense reads a tensor's value", ("test_steps_ask_for_no_values",)),
    FindsWhere: ("aten::nonzero has a result whose shape depends on data", ("test_steps_ask_for_no_values",)),
    ShapeFromData: ("index with a mask", ("test_steps_ask_for_no_values",)),
    CopiesToTheHost: ("Tensor.tolist", ("test_steps_ask_for_no_values",)),
    Float32Logits: ("logits of a bfloat16 model", ("test_bfloat16",)),
    KeepsAnOldCopy: ("run plainly", ("test_new_weights_in_place",)),
    RemembersRows: ("run plainly", ("test_preempted_and_resumed", "test_prefix_cache", "test_batch")),
    SilentTap: ("a step calls tap at", ("test_taps",)),
    DeafTap: ("a vector added at 'layer.0'", ("test_taps",)),
    RefusesWithoutReason: ("refuses without a reason", ("test_answers_for_every_feature",)),
    ShortTable: (r"logits of prompt \d", ("test_fills_its_context",)),
}


def suite_of(state: type[ModelState]) -> ModelStateConformance:
    class Suite(ModelStateConformance):
        model_state = state

        def tiny_config(self) -> Mapping[str, Any]:
            return TINY

    return Suite()


def run(suite: ModelStateConformance, name: str) -> None:
    test: Callable[..., None] = getattr(suite, name)
    test(**({"prefix": False} if name == "test_preempted_and_resumed" else {}))


@pytest.mark.parametrize("state", FOUND_BY, ids=lambda state: state.__name__)
def test_a_broken_state_is_found(state: type[ModelState]) -> None:
    message, names = FOUND_BY[state]
    suite = suite_of(state)
    for name in names:
        with pytest.raises(AssertionError, match=message):
            run(suite, name)


def test_the_whole_state_passes_them_all() -> None:
    suite = suite_of(DenseState)
    for name in sorted({name for _, names in FOUND_BY.values() for name in names}):
        run(suite, name)


class Refuses(DenseState):
    def supports(self, feature: str) -> Yes | No:
        return No("it was written on a Monday") if feature in ("prefix_cache", "chunked_prefill") else Yes()


class TestAStateThatRefusesFeatures(ModelStateConformance):
    """The suite runs it without them, and tests that the core refuses them."""

    model_state = Refuses

    def tiny_config(self) -> Mapping[str, Any]:
        return TINY

    def test_runs_without_the_features(self) -> None:
        settings = self.lab.engine().settings
        assert (settings.cache.prefix_caching, settings.scheduler.chunked_prefill) == (False, False)


def suite_with(**fields: Any) -> ModelStateConformance:
    class Suite(ModelStateConformance):
        model_state = DenseState

        def tiny_config(self) -> Mapping[str, Any]:
            return {**TINY, **fields}

    return Suite()


def test_every_test_tells_why_there_is_no_checkpoint() -> None:
    """Not that a folder of the test before is in the way."""
    suite = suite_with(pad_token_id=97)
    for name in ("test_logits_equal_the_reference", "test_depth"):
        with pytest.raises(ValueError, match=r"could not build tiny_config \{.*'pad_token_id': 97.*\}: .*must be below vocab_size"):
            run(suite, name)


def test_a_flat_answer_is_told_what_to_raise() -> None:
    class Flat(ModelStateConformance):
        model_state = DenseState

        def tiny_config(self) -> Mapping[str, Any]:
            return TINY

        def reference(self, folder: Path) -> Any:
            return lambda ids: torch.zeros(len(ids), 97)

    with pytest.raises(AssertionError, match=r"too flat an answer .* Raise initializer_range in tiny_config .* logits_scaling"):
        run(Flat(), "test_logits_equal_the_reference")


def test_a_class_that_says_too_little_is_told_what_is_missing() -> None:
    class Empty(ModelStateConformance):
        model_state = DenseState

    with pytest.raises(NotImplementedError, match="Empty must define tiny_config"):
        Empty().test_depth()
