"""What a prompt brings beside text, made ready for the engine: media through the family's processor, and embeddings as they are.

All of this happens where requests are made, in the caller's threads or in a front end's, and never in the engine's loop.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from modelrunner.errors import RequestError, kind_of
from modelrunner.media import EMBEDS, IMAGE, KINDS, VIDEO, Expanded, MediaItem, MediaProcessor, MediaRun, RequestMedia, Video
from modelrunner.media_load import Loader
from modelrunner.sampling_params import shown

if TYPE_CHECKING:
    import torch
    from PIL import Image as PillowImage

    from modelrunner.settings import MediaSettings

MEDIA_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
EMBEDS_KEY = "prompt_embeds"
EMBEDS_ID = 0  # token id of a position that has an embedding instead
EMBEDS_PIECE = 128  # tokens of prompt embeddings that have an item of their own
KEY_BYTES = 16


@dataclass(frozen=True)
class Prepared:
    """A prompt that is ready: its text (None if it came as ids), its token ids, its salt as given, and its media."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None
    media: RequestMedia | None = None


@dataclass(frozen=True)
class MediaFacts:
    """What a front end must know of the engine. problem: why requests with media are refused; empty if they are not. prompt_embeds_problem:
    the same for embeddings as prompts. hidden_size: elements of an embedding. dtype: torch's name of the model's type. position_rows: see
    `MediaNeeds`."""

    problem: str
    prompt_embeds_problem: str
    hidden_size: int
    dtype: str
    position_rows: int = 1


class MediaFront:
    """Makes `RequestMedia` of what prompts bring. Thread-safe.

    processor: makes the family's processor when the first request needs it; raises ImportError where something is not installed.
    """

    def __init__(self, settings: MediaSettings, facts: MediaFacts, processor: Callable[[], MediaProcessor]) -> None:
        self.facts = facts
        self._settings, self._make = settings, processor
        self._loader = Loader(settings)
        self._lock = threading.Lock()
        self._processor: MediaProcessor | None = None

    @property
    def processor(self) -> MediaProcessor:
        """The family's. Raises RequestError where there is none."""
        if self.facts.problem:
            raise RequestError(f"multi_modal_data: {self.facts.problem}")
        with self._lock:
            if self._processor is None:
                try:
                    self._processor = self._make()
                except ImportError as error:
                    raise RequestError(f"multi_modal_data: {error}") from error
            return self._processor

    # ---- media -------------------------------------------------------------------------------------------------------

    def prepare(self, prompt: Mapping[str, Any], token_ids: Sequence[int]) -> tuple[list[int], RequestMedia]:
        """The expanded prompt, and its media. prompt: a mapping with `multi_modal_data`. token_ids: those of its text.

        Raises RequestError.
        """
        processor = self.processor
        values = self._values(prompt["multi_modal_data"])
        check_names(prompt.get("multi_modal_uuids"), values)
        options = prompt.get("mm_processor_kwargs") or {}
        if not isinstance(options, Mapping):
            raise RequestError(f"mm_processor_kwargs: got {kind_of(options)}; accepted: a mapping of the model's processing options")
        items = [
            self._item(processor, kind, value, options, f"multi_modal_data: {kind} {number}")
            for kind, many in values.items()
            for number, value in enumerate(many)
        ]
        try:
            prompted = processor.expand(token_ids, items)
            positions = processor.positions(prompted, items)
        except ValueError as error:
            raise RequestError(f"multi_modal_data: {error}") from error
        return prompted.token_ids, self._checked(prompted, items, positions)

    def _values(self, data: object) -> dict[str, list[Any]]:
        """The items of each kind, as they were given, not more than are allowed."""
        if not isinstance(data, Mapping) or not data:
            raise RequestError(f"multi_modal_data: got {shown(data)}; accepted: a mapping from {' or '.join(map(repr, KINDS))} to items")
        kinds, found = self.processor.kinds, {}
        for kind, given in data.items():
            if kind not in kinds:
                raise RequestError(f"multi_modal_data: got kind {shown(kind)}; this model takes {', '.join(kinds)}")
            many = list(given) if isinstance(given, list) and not (kind == VIDEO and is_frames(given)) else [given]
            limit = self._settings.max_images if kind == IMAGE else self._settings.max_videos
            if len(many) > limit:
                raise RequestError(f"multi_modal_data: got {len(many)} items of kind {kind!r}; accepted: at most {limit} ({setting(kind)})")
            if many:
                found[kind] = many
        if not found:
            raise RequestError("multi_modal_data: it holds no item; leave it out, or give at least one")
        return found

    def _item(self, processor: MediaProcessor, kind: str, value: object, options: Mapping[str, Any], where: str) -> MediaItem:
        loaded = self._loader.image(value, where) if kind == IMAGE else self._loader.video(value, where)
        try:
            item = processor.process(kind, loaded, options)
        except ValueError as error:
            raise RequestError(f"{where}: {error}") from error
        if not item.num_embeddings:
            raise RequestError(f"{where}: it is too small: no embedding comes of it")
        return replace(item, key=content_key(processor, kind, loaded, options))

    def _checked(self, prompted: Expanded, items: Sequence[MediaItem], positions: Any) -> RequestMedia:
        """The media in the order of their runs. Raises RuntimeError for what a processor did wrong."""
        order = list(dict.fromkeys(run.item for run in prompted.runs))
        counts = [sum(run.length for run in prompted.runs if run.item == number) for number in range(len(items))]
        if counts != [item.num_embeddings for item in items] or sorted(order) != list(range(len(items))):
            raise RuntimeError(f"the processor's runs give items {counts} embeddings; they have {[item.num_embeddings for item in items]}")
        runs = tuple(run._replace(item=order.index(run.item)) for run in prompted.runs)
        if any(a.start + a.length > b.start or a.item > b.item for a, b in itertools.pairwise(runs)):
            raise RuntimeError("the processor's runs overlap, or those of one item lie between those of another")
        media = RequestMedia(tuple(items[number] for number in order), runs, positions)
        rows, length = self.facts.position_rows, len(prompted.token_ids)
        if (positions is None) != (rows == 1) or (positions is not None and positions.shape != (rows, length)):
            got = "none" if positions is None else list(positions.shape)
            raise RuntimeError(f"the processor gives positions of shape {got}; the model has {rows} for each of {length} tokens")
        if positions is not None and not (positions[:, media.end :] == np.arange(media.end, length) + media.delta).all():
            raise RuntimeError("the processor's positions behind the last run do not go on from the largest one, the same in all rows")
        return media

    # ---- embeddings --------------------------------------------------------------------------------------------------

    def embeds(self, value: object) -> tuple[list[int], RequestMedia]:
        """Token ids that stand for embeddings given as a prompt, and the embeddings. Raises RequestError."""
        import torch

        size, dtype = self.facts.hidden_size, getattr(torch, self.facts.dtype)
        if self.facts.prompt_embeds_problem:
            raise RequestError(f"prompt_embeds: {self.facts.prompt_embeds_problem}")
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(np.ascontiguousarray(value))
        accepted = f"a tensor [tokens, {size}] of float32, float16 or bfloat16, the model's hidden size"
        if not isinstance(value, torch.Tensor):
            raise RequestError(f"prompt_embeds: got {kind_of(value)}; accepted: {accepted}")
        shape = list(value.shape)
        if value.dtype not in (torch.float32, torch.float16, torch.bfloat16) or value.ndim != 2 or shape[1] != size or not shape[0]:
            raise RequestError(f"prompt_embeds: got {str(value.dtype).removeprefix('torch.')} of shape {shape}; accepted: {accepted}")
        value = value.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
        if not bool(torch.isfinite(value).all()):
            raise RequestError(f"prompt_embeds: a number is not finite (in {self.facts.dtype}, the model's type); accepted: finite numbers")
        pieces = value.split(EMBEDS_PIECE)
        items = tuple(embeds_item(piece) for piece in pieces)
        runs = tuple(MediaRun(number * EMBEDS_PIECE, len(piece), number, 0) for number, piece in enumerate(pieces))
        ids, rows = [EMBEDS_ID] * len(value), self.facts.position_rows
        positions = None if rows == 1 else np.tile(np.arange(len(ids), dtype=np.int32), (rows, 1))
        return ids, RequestMedia(items, runs, positions, is_embeds=True)


def setting(kind: str) -> str:
    return f"setting media.max_{kind}s"


def is_frames(given: list[Any]) -> bool:
    """Whether a list is the frames of one video, and not several videos."""
    return bool(given) and all(hasattr(each, "mode") and hasattr(each, "size") for each in given)


def check_names(names: object, values: Mapping[str, Sequence[object]]) -> None:
    """Names that the caller gives to items (`multi_modal_uuids`) are labels: an item is known by its content, so it must be there.

    Raises RequestError that says which name has no item, or which item no name.
    """
    if names is None:
        return
    if not isinstance(names, Mapping):
        raise RequestError(f"multi_modal_uuids: got {kind_of(names)}; accepted: a mapping from kinds to lists of names")
    for kind, given in names.items():
        many = [given] if isinstance(given, str) else list(given or ())
        items = values.get(kind, ())
        if len(many) != len(items):
            raise RequestError(f"multi_modal_uuids: {len(many)} names for {len(items)} items of kind {shown(kind)}; accepted: one each")
        for name, item in zip(many, items, strict=True):
            if item is None:
                raise RequestError(f"multi_modal_uuids: {shown(name)} comes without its {kind}; an item is always sent whole")


def content_key(processor: MediaProcessor, kind: str, value: PillowImage.Image | Video, options: Mapping[str, Any]) -> bytes:
    """Names the content, the processor with its settings, and the request's options."""
    text = blake2b(digest_size=KEY_BYTES)
    head = (type(processor).__qualname__, kind, processor.settings_key, sorted((name, repr(item)) for name, item in options.items()))
    text.update(repr(head).encode())
    if isinstance(value, Video):
        text.update(repr((value.frames.shape, value.fps, value.timestamps)).encode())
        text.update(value.frames.data)
    else:
        text.update(repr(value.size).encode())
        text.update(value.tobytes())
    return text.digest()


def embeds_item(piece: torch.Tensor) -> MediaItem:
    """An item of some tokens of a prompt given as embeddings."""
    import torch

    text = blake2b(f"{EMBEDS} {piece.dtype} {list(piece.shape)}".encode(), digest_size=KEY_BYTES)
    text.update(piece.reshape(-1).view(torch.uint8).numpy().data)
    count = len(piece)
    return MediaItem(EMBEDS, (EMBEDS_ID,) * count, np.ones(count, np.bool_), {"embeddings": piece}, key=text.digest())
