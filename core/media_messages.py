"""Media on their way from a front end to its engine process: tensors in memory that both see, the rest in the message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from modelrunner.media import MediaItem, MediaRun, RequestMedia
from modelrunner.messages import SentItem, SentMedia
from modelrunner.tensor_file import TensorFile, read_tensors

if TYPE_CHECKING:
    import torch


class Parcel:
    """A request's media, ready to be sent. The memory lives as long as this; the engine process keeps what it has opened."""

    def __init__(self, media: RequestMedia) -> None:
        """Copies the tensors: not in an event loop."""
        self._file = TensorFile()
        items = []
        for item in media.items:
            first = len(self._file.entries)
            for name, tensor in item.tensors.items():
                self._file.add(name, tensor)
            items.append(SentItem(item.kind, item.key, item.num_embeddings, dict(item.info), len(self._file.entries) - first))
        runs = [list(run) for run in media.runs]
        self.message = SentMedia(self._file.path, self._file.entries, items, runs, media.positions, media.is_embeds)


def unpack(message: SentMedia) -> RequestMedia:
    """The media that were sent. Their tensors are read in place. Raises OSError when the sender is gone."""
    tensors = read_tensors(message.path, message.entries)
    items = tuple(_item(sent, tensors) for sent in message.items)
    return RequestMedia(items, tuple(MediaRun(*run) for run in message.runs), message.positions, message.is_embeds)


def _item(sent: SentItem, tensors: Iterator[tuple[str, torch.Tensor]]) -> MediaItem:
    own = dict(next(tensors) for _ in range(sent.num_tensors))
    return MediaItem(sent.kind, (), np.ones(sent.num_embeddings, np.bool_), own, sent.info, sent.key)
