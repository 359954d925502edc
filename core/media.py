"""Media of requests: what a family's processor makes of an image or a video, and where it stands in a prompt.

The way of an image: the front end decodes it and hands it to the family's `MediaProcessor`, on the host and beside the engine's loop. That
gives a `MediaItem`: the tokens that it becomes in the prompt, which of them take an embedding, and tensors for the encoder. The engine has
`ModelState.encode` turn these tensors into embeddings, on a stream beside that of the steps, and keeps them in an arena by their content.
In a step the tokens of its runs take their embeddings from there instead of from the model's table.

Everything here but `EncoderInput` and `MediaBatch` is of the host, and can be sent to another process. Nothing here imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from PIL import Image as PillowImage

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]

IMAGE, VIDEO = "image", "video"
KINDS = (IMAGE, VIDEO)
EMBEDS = "embeds"  # items of prompt embeddings, which no encoder makes


@dataclass(frozen=True)
class MediaNeeds:
    """What a multimodal ModelState asks the core for, as `Needs.media`.

    features: vectors of the hidden size that the encoder gives beside each embedding, for layers deeper down (DeepStack: Meng et al. 2024,
    arXiv:2406.04334). position_rows: positions that a token has: 1 is its index in the request, 3 is M-RoPE (time, height, width).
    max_embeddings: of one item, the most that `MediaProcessor.process` can give. capture: `ModelState.encode` of one item may be recorded
    as a graph and replayed for others of equal `info` and tensors of equal shapes, if it is small.
    """

    features: int = 0
    position_rows: int = 1
    max_embeddings: int = 16384
    capture: bool = False

    def __post_init__(self) -> None:
        if self.features < 0 or self.position_rows < 1 or self.max_embeddings < 1:
            raise ValueError(f"{self}: features must not be negative, position_rows and max_embeddings at least 1")

    def width(self, hidden_size: int) -> int:
        """Elements of a line of the arena: the embedding, then the features one after the other."""
        return hidden_size * (1 + self.features)


@dataclass(frozen=True)
class Video:
    """A decoded video. frames: [F, height, width, 3] uint8, RGB. fps: frames a second of `frames`, as they were taken out of the file.
    timestamps: seconds of each frame from the start, [F]."""

    frames: npt.NDArray[np.uint8]
    fps: float
    timestamps: tuple[float, ...]


@dataclass(frozen=True)
class MediaItem:
    """One image or video, ready for the encoder. Made by `MediaProcessor.process`.

    kind: `image` or `video`. tokens: ids that it becomes in the prompt. embedded: [len(tokens)] bool, which of them take an embedding; the
    others (separators, time stamps) are text. tensors: what the encoder reads, on the CPU, contiguous, any dtype and shape; the core brings
    them to the device through pinned memory, so put there what would else be made of host numbers while encoding (patches, window orders,
    cosines). info: plain host values that the encoder needs (grids, lengths of segments): numbers, strings, and lists, tuples or mappings
    with text keys of such; tuples may arrive as lists.
    key: names content and processing together; the core fills it in. Equal keys have equal embeddings.
    """

    kind: str
    tokens: tuple[int, ...]
    embedded: BoolArray
    tensors: Mapping[str, torch.Tensor]
    info: Mapping[str, Any] = field(default_factory=dict)
    key: bytes = b""

    @property
    def num_embeddings(self) -> int:
        return int(np.count_nonzero(self.embedded))


class MediaRun(NamedTuple):
    """Consecutive tokens of a prompt that take consecutive embeddings of an item. start: the first token's index in the prompt. item: the
    item's number in the request. offset: the first embedding's number in the item."""

    start: int
    length: int
    item: int
    offset: int


@dataclass(frozen=True)
class Expanded:
    """A prompt with its items in their places. token_ids: the whole prompt. runs: by rising start; those of an item are all its embeddings
    in order, and no other item's runs lie between them."""

    token_ids: list[int]
    runs: tuple[MediaRun, ...]


class MediaProcessor(ABC):
    """A family's work on media, on the host: no device, no weights. `ModelState.media_processor` makes one per process, in front ends too,
    where the model is not loaded. `process` is called by several threads at once.

    kinds: those of `KINDS` that the model takes. settings_key: names whatever the results depend on beside content and options (sizes,
    means, patch size of this checkpoint); part of each item's key.
    """

    kinds: ClassVar[tuple[str, ...]] = (IMAGE,)

    def __init__(self) -> None:
        self.settings_key = b""

    @abstractmethod
    def process(self, kind: str, value: PillowImage.Image | Video, options: Mapping[str, Any]) -> MediaItem:
        """H R. Make an item of an RGB image, or of a video. options: the request's `mm_processor_kwargs`.

        Raises ValueError, which ends this request alone, for a size that the model cannot take, and for unknown options.
        """

    @abstractmethod
    def placeholder(self, kind: str) -> tuple[int, ...]:
        """H R. The token ids that stand for an item in a prompt which is not expanded yet; usually one."""

    @abstractmethod
    def dummy(self, max_embeddings: int) -> MediaItem:
        """H R. An item with as many embeddings as an item can have, but no more than that: for the warm-up and the count of memory.

        Its tensors may hold anything of the right shapes.
        """

    def placeholder_text(self, kind: str) -> str:
        """H. What `LLM.chat` puts into a message's text for an item, for chat templates that take no parts of other types.

        Raises ValueError where there is none; then parts go to the template as they are, `{"type": "image"}`.
        """
        raise ValueError(f"no text stands for an item of kind {kind!r}")

    def expand(self, token_ids: Sequence[int], items: Sequence[MediaItem]) -> Expanded:
        """H. Put the tokens of each item in the place of its placeholder. items: in the order of the request, each kind by itself.

        An expanded place, where the item's tokens stand already, is accepted as it is. Raises ValueError when there are not as many places
        as items of a kind, naming both numbers. The default does this for any family whose items know their tokens.
        """
        from modelrunner.media_prompt import expand

        return expand(self, token_ids, items)

    def positions(self, prompt: Expanded, items: Sequence[MediaItem]) -> Int32Array | None:
        """H. Positions of the prompt's tokens, [position_rows, n] int32, not negative; None where a token's position is its index.

        Behind the last run of a prompt all rows go on by one per token; so do output tokens, from the largest position + 1 on.
        """
        return None


@dataclass(frozen=True)
class EncoderInput:
    """An item as `ModelState.encode` sees it: `tensors` are on the device, of the shapes and types that the item gave them; they may be
    views of one buffer that is written again after the encoding. info, kind, num_embeddings: of the item, on the host."""

    kind: str
    num_embeddings: int
    tensors: Mapping[str, torch.Tensor]
    info: Mapping[str, Any]


@dataclass(frozen=True)
class MediaBatch:
    """D. The media of a step: where each of its T tokens finds its embedding. Only steps of the `media` kind have one: those that compute a
    token before the end of its request's last run.

    arena: [lines, (1 + features) * H], in the model's dtype, never moves. slots: [T] int32, the token's line, -1 for a token of text.
    following: [T] int32, the line of the token after each, -1 also where it is not encoded yet; None where the drafter does not ask.
    Read it by the operations `place_media` (core's, after `embed`) and `add_media`.
    """

    arena: torch.Tensor
    slots: torch.Tensor
    following: torch.Tensor | None = None


def runs_of(embedded: BoolArray, start: int, item: int) -> list[MediaRun]:
    """The runs of an item whose first token is token `start` of the prompt."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], embedded, [False]]).astype(np.int8)))
    runs, offset = [], 0
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        runs.append(MediaRun(start + first, last - first, item, offset))
        offset += last - first
    return runs


@dataclass(frozen=True)
class RequestMedia:
    """The media of a request, as the engine keeps it until the request ends.

    items: in the order of their runs. runs: see `Expanded`. positions: see `MediaProcessor.positions`. is_embeds: the whole prompt is
    embeddings that the caller gave.
    """

    items: tuple[MediaItem, ...]
    runs: tuple[MediaRun, ...]
    positions: Int32Array | None = None
    is_embeds: bool = False

    @cached_property
    def starts(self) -> list[int]:
        """First token of each item that takes an embedding."""
        return [min(run.start for run in self.runs if run.item == number) for number in range(len(self.items))]

    @cached_property
    def ends(self) -> list[int]:
        """Tokens up to the end of each item's last run."""
        return [max(run.start + run.length for run in self.runs if run.item == number) for number in range(len(self.items))]

    @property
    def end(self) -> int:
        """Tokens up to the end of the last run."""
        return self.ends[-1]

    def first_needed(self, computed: int) -> int:
        """The first item that computing the tokens from `computed` on reads; the number of items if there is none."""
        return bisect_right(self.ends, computed)

    @property
    def delta(self) -> int:
        """What output tokens' positions are more than their index; negative for M-RoPE, as a rule."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - self.positions.shape[1]


__all__ = [
    "EMBEDS",
    "IMAGE",
    "KINDS",
    "VIDEO",
    "EncoderInput",
    "Expanded",
    "MediaBatch",
    "MediaItem",
    "MediaNeeds",
    "MediaProcessor",
    "MediaRun",
    "RequestMedia",
    "Video",
    "runs_of",
]
