"""Speculative decoding: the protocol of drafters.

A drafter proposes tokens; the next step of the target computes them together with the row's newest token, and keeps as many as it would
have chosen itself (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318). All of it happens on the device: step N+1
is planned and enqueued before the host knows what step N accepted.

Life of a drafter: the hook `drafter` offers a class; the core makes one instance, asks it to `declare`, to `build` its module, fills that
from a checkpoint (`weight_map`), and from then on calls `propose` after the tail of every step, on the same stream, inside capture where
steps are captured. H and D as in `model_state`: H runs on the host, D enqueues device work and never synchronises.

Dimension letters: N rows and T tokens of the step, padding included; k draft tokens; H hidden size and V vocabulary size of the target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from modelrunner.model_state import CacheGroup, No, StaticBuffer, Yes, check_entries

if TYPE_CHECKING:
    import torch
    from torch import nn

    from modelrunner.attention import BoundAttention
    from modelrunner.batch import Batch
    from modelrunner.checkpoint import CheckpointReader, ModelCard
    from modelrunner.model_state import BuildContext, ModelState
    from modelrunner.request import Request
    from modelrunner.request_table import Column
    from modelrunner.settings import RunnerSettings
    from modelrunner.text import Tokenizer
    from modelrunner.weights import WeightMap


@dataclass(frozen=True)
class TargetModel:
    """The model that a drafter works for, as the hook `drafter` is told before any weight is read.

    max_model_len: most tokens of a request. tap_points: names that a drafter may list in `DrafterNeeds.tap_points`. state_for: the
    ModelState class that the hook `model_state` chooses for a card, for a drafter that is a whole model.
    """

    card: ModelCard
    hidden_size: int
    vocab_size: int
    max_model_len: int
    tap_points: tuple[str, ...]
    state_for: Callable[[ModelCard], type[ModelState]]


@dataclass(frozen=True)
class DrafterNeeds:
    """What a drafter asks the core for.

    cache_groups: its own, with names that no group of the target has. What they keep of a token lies in the pages of a group of the target
    that sees the same tokens, and is found by prefixes and freed with it; without such a group they have pages and a block table of their
    own. There are pages for k tokens beyond those that the step computes. columns: request-table columns (plain ones).
    buffers: static device tensors, found as `step.batch.buffers[name]`; their names are nobody else's.
    shifted: what a cache group holds at a position was made from the token after it, too (as in EAGLE, where a hidden state meets the next
    token): a page is then found only by sequences that go on with the same token after it.
    hidden: whether `DraftStep.hidden` is wanted. tap_points: points of the target whose hidden states are wanted, as `DraftStep.taps`.
    probabilities: the drafter draws its tokens, and gives the distribution that it drew each from. Without, a proposal counts as certain.
    max_tokens: most tokens that it can propose a row; None for any number. max_model_len: positions that it can hold; None for as many as
    the target has. A row that would pass them has no drafts, and goes on without.
    capture: `full`, or `none` with `capture_reason`: then `propose` runs after the step's graph, which stays captured.
    """

    cache_groups: tuple[CacheGroup, ...] = ()
    columns: tuple[Column, ...] = ()
    buffers: tuple[StaticBuffer, ...] = ()
    shifted: bool = False
    hidden: bool = False
    tap_points: tuple[str, ...] = ()
    probabilities: bool = False
    max_tokens: int | None = None
    max_model_len: int | None = None
    capture: Literal["full", "none"] = "full"
    capture_reason: str = ""

    def __post_init__(self) -> None:
        check_entries(self)
        if self.capture == "none" and not self.capture_reason:
            raise ValueError("capture is 'none' without a capture_reason; say why proposing cannot be captured into a graph")
        for name in ("max_tokens", "max_model_len"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; accepted: an integer of at least 1, or None for no limit")


@dataclass(frozen=True)
class DraftBuild:
    """What `Drafter.build` gets.

    context: as a ModelState gets it, but with the drafter's card (the target's, if the drafter has none of its own). target: the target's
    ModelState with its weights loaded: its embedding and head may be shared, by calling `target.embed` and `target.logits`
    or by using its modules. reader: of the checkpoint that the weights will come from. tokenizer, own_tokenizer: of the target and of the
    drafter's checkpoint; None where there is none.
    """

    context: BuildContext
    target: ModelState
    reader: CheckpointReader
    tokenizer: Tokenizer | None
    own_tokenizer: Callable[[], Tokenizer | None]


@dataclass(frozen=True)
class DraftPass:
    """One more token of each row, fed by the drafter itself.

    batch: N rows of one query token each, so T = N. A row that takes part has query_len 1; any other one (it wants no drafts, or the
    position is beyond its limit, the drafter's context or the pages it holds) has query_len 0, seq_len 0, position 0 and slots of -1, and
    `token_valid` False. `input_ids` is not filled: what a row feeds is the drafter's own affair. attention: the drafter's groups,
    name -> callable over these N tokens, whose keys and values go to their positions.
    """

    batch: Batch
    attention: Mapping[str, BoundAttention]


@dataclass(frozen=True)
class DraftStep:
    """What `propose` gets: the step that the target has just ended, its results included. Nothing in it may be changed.

    batch: the step as the target ran it, with its lengths from before (`computed`, `query_len`, `seq_len`); rows that do not live have
    query_len 0. `batch.num_draft` drafts of each decode row were in it, `num_draft` are wanted now; with 0 only caches are brought up to
    date (called so for drafters with cache groups alone).
    wants [N] bool: the row lives, knows its next token and may go on: propose for it. Others are left out, whatever is written for them.
    known [N] int32: tokens that the row knows now, prompt and output. newest [N] int64: id of the last of them, which is in no cache yet;
    its position is known - 1. last_place [N] int64: place in [0, T) of the token before it, the last one of the step that counts; of a row
    whose prompt goes on, its last token in the step. Rows without a token in the step have some valid place.
    next_ids [T] int64: for each token of the step, the id at the position that follows, as far as it is known, else 0. So the last token
    that counts is followed by `newest`, and the end of a chunk by the prompt's next token. positions [T] int64: the step's, none beyond
    what the drafter can hold.
    hidden [T, H]: what the target's `forward` returned, normalised, ready for its `logits`; None unless declared. taps: point -> [T, H],
    the target's hidden states there, before anybody changes them. Places of rejected drafts hold what was computed for them.
    attention: the drafter's groups, name -> callable over the step's T tokens (as in `ModelState.forward`). Keys and values that it writes
    for tokens that do not count are written again by the next step before they are read. caches: its groups' memory by name.
    columns: the request table's, `[max_rows + 1]` or `[max_rows + 1, width]`, at `batch.rows`; among them `token_ids`, of which the
    first `known` of a row are its tokens, `seed` and `choice`.
    next_pass(i): a pass over the token at position known - 1 + i of each row: i = 0 is the place of `newest`, then follow those of the
    drafts. Each call is made once, in rising order; what an earlier one returned is no longer valid.
    """

    batch: Batch
    num_draft: int
    wants: torch.Tensor
    known: torch.Tensor
    newest: torch.Tensor
    last_place: torch.Tensor
    next_ids: torch.Tensor
    positions: torch.Tensor
    hidden: torch.Tensor | None
    taps: Mapping[str, torch.Tensor]
    attention: Mapping[str, BoundAttention]
    caches: Mapping[str, torch.Tensor]
    columns: Mapping[str, torch.Tensor]
    next_pass: Callable[[int], DraftPass]


class Drafter(ABC):
    """Proposes tokens for the rows of a step. One instance per engine; `module` is set by the core once `build` returned one.

    A request's result does not depend on what is proposed, only its speed does; so a drafter may be wrong, but must be quick.
    """

    module: nn.Module | None = None

    def __init__(self, card: ModelCard | None, target: TargetModel, settings: RunnerSettings) -> None:
        """Stores all three, and does nothing else; an override calls it first. card: of the checkpoint that `speculation.model` names."""
        self.card = card
        self.target = target
        self.settings = settings

    # ---- start-up ------------------------------------------------------------------------------------------------

    @abstractmethod
    def declare(self) -> DrafterNeeds:
        """H. State what the core must provide, before weights are read and cache memory is taken.

        Raises ValueError for a checkpoint that does not fit the target, with both values: start-up ends with it.
        """

    def supports(self, feature: str) -> Yes | No:
        """H. Answer for a feature, in the words of `ModelState.supports`: `prefix_cache`, `chunked_prefill`, `deterministic`.

        Asked at start-up for every feature that the settings turn on; a No is an error there.
        """
        return Yes()

    def build(self, build: DraftBuild) -> nn.Module | None:
        """H. Create the module with empty parameters, as `ModelState.build` does; None for a drafter without weights."""
        return None

    def weight_map(self) -> WeightMap | None:
        """H. Map checkpoint tensors to the module's parameters; None if there is nothing to load.

        They are read from the checkpoint that `speculation.model` names, or from the target's where it names none: there the map's
        `ignored` covers the target's own tensors.
        """
        return None

    # ---- requests ------------------------------------------------------------------------------------------------

    def row_values(self, request: Request) -> Mapping[str, Any]:
        """H, at submission. Values of the drafter's own columns, by name (unnamed ones get their default)."""
        return {}

    # ---- the step ------------------------------------------------------------------------------------------------

    @abstractmethod
    def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        """D. Write up to k tokens for each row that wants some.

        out: [N, k] int32, k = `step.num_draft`, filled with -1: the tokens to come after `newest`, in order, from the left; -1 ends a row's
        proposal early, and nothing after it counts. An id outside the target's vocabulary counts as -1. probabilities: [N, k, V] float32,
        zeros, if declared: what each token was drawn from, with the row's own noise of the purpose `draft` (operation `gumbel_noise`).
        A drafter with cache groups is called after every step, so that its caches have no gaps: first for the step's T tokens
        (`step.attention`), then for single tokens (`step.next_pass`). Without drafts to make (k = 0) the first part is all.

        A shifted drafter pairs the hidden state at a position with the token after it, so the step's tokens take it to `newest` already:
        row i's first draft comes from `last_place[i]`, and `next_pass(0)` takes the first draft. An unshifted one has read up to the token
        before `newest`, which is what `next_pass(0)` feeds.
        """
