"""The ModelState contract: all that the core asks about a model family.

A family subclasses `ModelState`. Methods marked H run on the host, outside the step. Methods marked D enqueue device work, may be captured
into a graph, and therefore never synchronise: no `.item()`, `.tolist()`, `.cpu()`, no branch on a tensor's value, no allocation whose size
depends on data. R marks the required ones; every other method has a default that fits a plain decoder.

Dimension letters: T tokens of the step, N rows of the step, H hidden size, V vocabulary size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn

from modelrunner.cache_groups import CacheGroup, FullAttention, RecurrentState, SlidingWindow, check_group
from modelrunner.errors import PluginError
from modelrunner.request_table import Column

if TYPE_CHECKING:
    from modelrunner.attention import AttentionMeta, BoundAttention
    from modelrunner.batch import Batch
    from modelrunner.checkpoint import ModelCard
    from modelrunner.linear import LinearFactory
    from modelrunner.media import EncoderInput, MediaNeeds, MediaProcessor
    from modelrunner.ops import Ops
    from modelrunner.request import Request
    from modelrunner.settings import RunnerSettings
    from modelrunner.taps import Result
    from modelrunner.text import Tokenizer
    from modelrunner.weights import WeightMap

__all__ = [
    "BuildContext",
    "CacheGroup",
    "FullAttention",
    "ModelState",
    "Needs",
    "No",
    "RecurrentState",
    "Shard",
    "SlidingWindow",
    "StaticBuffer",
    "Tap",
    "Yes",
    "required_features",
]


@dataclass(frozen=True)
class StaticBuffer:
    """A device tensor that the core allocates before capture and never moves; found as `batch.buffers[name]`.

    shape: ints; "tokens" and "rows" stand for the step's capacities.
    """

    name: str
    shape: tuple[int | Literal["tokens", "rows"], ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not isinstance(self.shape, (tuple, list)):
            raise TypeError(f"buffer {self.name!r}: shape is {self.shape!r}; a tuple is needed, also of one, e.g. ('tokens',)")
        for size in self.shape:
            if size not in ("tokens", "rows") and not (isinstance(size, Integral) and size >= 0):
                raise ValueError(f"buffer {self.name!r}: {size!r} in its shape; accepted are 'tokens', 'rows' and whole numbers from 0 on")
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"buffer {self.name!r}: dtype is {self.dtype!r}; a torch.dtype is needed, e.g. torch.int32")


def check_entries(needs: object) -> None:
    """Raise TypeError or ValueError for what the core cannot allocate among `needs`' cache groups, columns and buffers."""
    for field_name, kind in (("cache_groups", CacheGroup), ("columns", Column), ("buffers", StaticBuffer)):
        entries: object = getattr(needs, field_name)
        if not isinstance(entries, (tuple, list)):
            raise TypeError(f"{type(needs).__name__}: {field_name} is {entries!r}; a tuple is needed, also of one, e.g. (one,)")
        if strangers := [entry for entry in entries if not isinstance(entry, kind)]:
            raise TypeError(f"{type(needs).__name__}: {field_name} has {strangers[0]!r}; every entry must be a {kind.__name__}")
        for group in entries:
            if isinstance(group, CacheGroup):
                check_group(group)


@dataclass(frozen=True)
class Needs:
    """What a ModelState asks the core to allocate.

    cache_groups: one block table each. columns: request-table columns that this state owns; seated ones are for sampler stages and taps.
    max_model_len: the most tokens (prompt and output) that the model can hold. tap_points: names at which `forward` calls its tap.
    results: what `ModelState.outputs` gives. capture: `full`, or `none` with `capture_reason`. media: of a multimodal state; None for text.
    """

    cache_groups: tuple[CacheGroup, ...]
    hidden_size: int
    vocab_size: int
    max_model_len: int
    columns: tuple[Column, ...] = ()
    buffers: tuple[StaticBuffer, ...] = ()
    tap_points: tuple[str, ...] = ()
    results: tuple[Result, ...] = ()
    capture: Literal["full", "none"] = "full"
    capture_reason: str = ""
    media: MediaNeeds | None = None

    def __post_init__(self) -> None:
        check_entries(self)
        for field_name in ("tap_points", "results"):
            value = getattr(self, field_name)
            if not isinstance(value, (tuple, list)):
                raise TypeError(f"Needs: {field_name} is {value!r}; a tuple is needed, also of one, e.g. (one,)")
        for field_name in ("hidden_size", "vocab_size", "max_model_len"):
            value = getattr(self, field_name)
            if not isinstance(value, int) or value < 1:
                raise TypeError(f"Needs: {field_name} is {value!r}; a whole number above 0 is needed")
        if self.capture not in ("full", "none"):
            raise ValueError(f"Needs: capture is {self.capture!r}; accepted are 'full' and 'none'")
        names = [group.name for group in self.cache_groups]
        if len(set(names)) < len(names) or any(len(set(group.layers)) < len(group.layers) for group in self.cache_groups):
            listing = [(group.name, group.layers) for group in self.cache_groups]
            raise ValueError(f"cache groups {listing}: each name, and each layer within a group, may stand there once")
        if self.capture == "none" and not self.capture_reason:
            raise ValueError("capture is 'none' without a capture_reason; say why the step cannot be captured into a graph")


@dataclass(frozen=True)
class Yes:
    """The feature works."""


@dataclass(frozen=True)
class No:
    """The feature does not work, and why."""

    reason: str


class Supports(Protocol):
    def supports(self, feature: str) -> Yes | No: ...


def answer_of(owner: Supports, feature: str) -> Yes | No:
    """What `owner.supports` says of a feature. Raises PluginError unless that is Yes() or No(reason): None could be taken for either."""
    answer: object = owner.supports(feature)
    if isinstance(answer, Yes | No):
        return answer
    got = answer.__name__ if isinstance(answer, type) else repr(answer)
    raise PluginError(f"{type(owner).__name__}.supports({feature!r}) returned {got}; Yes() or No('why not') is needed")


@dataclass(frozen=True)
class Shard:
    """This process's part of a model split over several devices."""

    rank: int = 0
    size: int = 1


def _stay() -> None:
    """A context made by hand has nobody to give way to."""


@dataclass(frozen=True)
class BuildContext:
    """What `build` gets: build layers from these and from nothing global.

    linear: makes `Linear` layers of the chosen scheme. ops: operations chosen for the device. dtype, device: of parameters and activations.
    give_way: an encoder calls it between its layers, and leaves the device to those who decode for a while (`media.encoder_share`). It may
    wait; called outside of `ModelState.encode` it does nothing.
    """

    settings: RunnerSettings
    card: ModelCard
    ops: Ops
    linear: LinearFactory
    dtype: torch.dtype
    device: torch.device
    shard: Shard = field(default_factory=Shard)
    give_way: Callable[[], None] = field(default_factory=lambda: _stay)


Tap = Callable[[str, torch.Tensor], torch.Tensor]
"""The function that `forward` calls at each of its tap points: (point, hidden [T, H]) -> hidden, perhaps changed.

Not `modelrunner.taps.Tap`, which `modelrunner.Tap` names: that is the class of what a plugin brings to be called at such points.
"""


class ModelState(ABC):
    """A model family, as the core sees it. One instance per engine; `module` is set by the core once `build` returned."""

    module: nn.Module
    narrows: bool = False  # `forward` takes `sampled`

    def __init__(self, card: ModelCard, settings: RunnerSettings) -> None:
        """Stores both as `self.card` and `self.settings`, and does nothing else; an override calls it first."""
        self.card = card
        self.settings = settings

    # ---- start-up ------------------------------------------------------------------------------------------------

    @abstractmethod
    def declare(self, card: ModelCard, settings: RunnerSettings) -> Needs:
        """H R. State what the core must allocate.

        Raises ValueError for a configuration that the family cannot run; the start-up ends with it. Where the hook `model_state` can see
        that already, a `Decline` there is better: another plugin may then run the model, and `modelrunner explain` shows the reason.
        """

    def supports(self, feature: str) -> Yes | No:
        """H. Answer for a feature: `prefix_cache`, `chunked_prefill`, `speculation`, `prompt_logprobs`, `graphs`, `taps`,
        `deterministic` (all that mixes the values of a token is done by `ctx.ops` and `ctx.linear`, not by torch, which chooses kernels by
        how many tokens there are), `multimodal` (of a state that declares `Needs.media`), `prompt_embeds` (a token's embedding is all that
        the layers know of it, so any may stand there).

        Asked at start-up for every feature that the settings turn on; a No is an error there, never a silent fallback. One for `multimodal`
        refuses requests with media instead, and says why: the model still serves text.
        """
        return Yes()

    @abstractmethod
    def weight_map(self, card: ModelCard) -> WeightMap:
        """H R. Map checkpoint tensors to the module's parameters."""

    @abstractmethod
    def build(self, ctx: BuildContext) -> nn.Module:
        """H R. Create the module with empty parameters on `ctx.device`, of `ctx.dtype`.

        `ctx.linear` makes layers that follow the chosen linear scheme; plain `torch.nn` layers may be used too, made with
        `device=ctx.device, dtype=ctx.dtype`, and their parameters are filled by targets of kind `parameter`.
        A head tied to the embedding: `ctx.linear(hidden_size, vocab_size, tied=self.embedding.weight)`, with both the embedding's
        parameter and the head as targets of the embedding's checkpoint name in the weight map.
        """

    def fill_dummy(self, batch: Batch) -> None:
        """H. Write harmless inputs into the state's own buffers, before warm-up and capture."""
        return None

    # ---- media ---------------------------------------------------------------------------------------------------

    def media_processor(self, tokenizer: Tokenizer | None) -> MediaProcessor:
        """H, required of a state that declares `Needs.media`: its work on images and videos before the engine.

        Also called in front ends, on an instance of which nothing was declared or built: it may use `self.card` and `self.settings`.
        tokenizer: None with `skip_tokenizer_init`. Raises ImportError, with what to install, where a package is not there; requests with
        media are refused then with that text.
        """
        raise NotImplementedError(f"{type(self).__name__} declares Needs.media and has no media_processor")

    def encode(self, items: Sequence[EncoderInput], out: torch.Tensor) -> None:
        """D, required with `Needs.media`: write the embeddings of `items`, one item after the other, into `out`
        [sum of num_embeddings, (1 + features) * H], contiguous, of the model's dtype: each line an embedding, then its features.

        Enqueued on a stream of its own while steps run, and captured only with `MediaNeeds.capture`, item by item for each `info`: shapes
        may depend on `info` and may allocate, but as in a step nothing waits for the device, and host numbers come in by `tensors`. It may
        touch nothing that a step writes.
        What an item's lines are must not depend on the other items. An encoder of many layers calls `BuildContext.give_way` between them.
        """
        raise NotImplementedError(f"{type(self).__name__} declares Needs.media and has no encode")

    # ---- requests ------------------------------------------------------------------------------------------------

    def add_row(self, row: int, request: Request) -> Mapping[str, Any]:
        """H. A request takes `row`: the values of this state's own columns, by column name (unnamed ones get their default)."""
        return {}

    def resume_row(self, row: int, request: Request) -> Mapping[str, Any]:
        """H. A preempted request comes back in `row`, with all its tokens known."""
        return self.add_row(row, request)

    def remove_row(self, row: int, request: Request) -> None:
        """H. The request left `row`: finished, aborted or preempted."""
        return None

    # ---- the step --------------------------------------------------------------------------------------------------

    @abstractmethod
    def embed(self, batch: Batch, out: torch.Tensor) -> None:
        """D R. Write the embeddings of `batch.input_ids` [T] into `out` [T, H].

        Tokens of media have the ids of their placeholders here; the core puts their embeddings over what this writes.
        """

    def positions(self, batch: Batch, out: torch.Tensor) -> torch.Tensor:
        """D. Positions for `forward`; `out` [T] int64 already holds each token's index in its request and is the default.

        Of a state with `MediaNeeds.position_rows` > 1 it is [T] int64 in steps without media, index + what the request's media made of it
        (the same in all rows), and [position_rows, T] in steps with some (`batch.media` is not None).
        """
        return out

    def attention_metadata(self, group: CacheGroup, batch: Batch, base: AttentionMeta) -> AttentionMeta:
        """H. `base` is the core's own metadata of the group; return it, or a `dataclasses.replace` of it."""
        return base

    def before_forward(self, batch: Batch) -> None:
        """D. Work at the head of the step, e.g. moving recurrent state."""
        return None

    @abstractmethod
    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: Mapping[str, BoundAttention],
        caches: Mapping[str, torch.Tensor],
        tap: Tap,
    ) -> torch.Tensor:
        """D R. Run the layers.

        hidden: [T, H] embeddings, may be overwritten. positions: what `positions` returned. attention: group name -> callable
        `(q, k, v, layer) -> [T, num_heads * head_dim]`, which writes k and v at the step's slots; of a group that does not attend, only
        its `meta` is of use. caches: group name -> [num_pages, num_layers, *page_shape]. tap: call it as `hidden = tap(name, hidden)` at
        declared tap points. The warm-up checks the shapes and types that attention is called with, and that some step calls each declared
        point and none calls another; later steps check nothing.
        Returns [T, H], normalised, ready for `logits`.

        A state that `narrows` takes one more argument, by keyword: `sampled: torch.Tensor | None = None`, [n] int64, the last token of each
        of the step's first rows, given in long steps in which nothing else is wanted and nobody taps. It returns these alone then, [n, H].
        Keys and values of all tokens are written all the same.

        A state that declares `Needs.media` takes one more argument, by keyword: `media: MediaBatch | None = None`, None in steps without
        media. It is for the features beside embeddings, of which the j-th is added, where the token has one, by
        `ctx.ops.add_media(hidden, media.arena, media.slots, (1 + j) * H)`, in place.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """D R. [n, H] -> [n, V], in the model's dtype: a tensor made or written anew each time, since masks are written into it."""

    def outputs(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """D, after `forward`, in steps in which a request asks by `extra_args={"model_outputs": True}`: what the model gives beside tokens.

        Each of `Needs.results` by name, [N, *shape]; as in `Tap.outputs`, row i is the entry of the token that the row samples.
        """
        return {}


def required_features(settings: RunnerSettings) -> Sequence[str]:
    """Features that the settings turn on, in the words of `ModelState.supports`."""
    wanted = []
    if settings.cache.prefix_caching:
        wanted.append("prefix_cache")
    if settings.scheduler.chunked_prefill:
        wanted.append("chunked_prefill")
    if settings.device.deterministic:
        wanted.append("deterministic")
    if settings.speculation.drafter is not None:
        wanted.append("speculation")
    return wanted
