"""Encoding media on the device: from the tensors of items to lines of the arena, on a stream beside that of the steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from modelrunner.media import EMBEDS, EncoderInput, MediaItem

if TYPE_CHECKING:
    from modelrunner.device import Device, SideEvent
    from modelrunner.media import Int32Array
    from modelrunner.model_state import ModelState


class Encoder:
    """Owns the arena: [lines, width] of `dtype`, at a fixed address. Lines that nobody has written hold NaN on a testing device."""

    def __init__(
        self, device: Device, state: ModelState, lines: int, width: int, hidden_size: int, dtype: torch.dtype, narrow: int = 0
    ) -> None:
        """width: elements of a line, of which the first `hidden_size` are the embedding. narrow: most embeddings of an encoding that may
        run on a part of the device."""
        self._device, self._state, self._hidden_size = device, state, hidden_size
        self.narrow = narrow
        self.arena = torch.full((lines, width), torch.nan if device.poison else 0.0, dtype=dtype, device=device.torch_device)

    def start(self, items: Sequence[MediaItem], lines: Sequence[Int32Array]) -> SideEvent:
        """Enqueue the encoding of items into the arena's lines, [num_embeddings] each. Nothing else may read or write these until the event
        is done."""
        places = np.concatenate(lines)
        return self._device.launch_side(partial(self._run, tuple(items), places), narrow=places.size <= self.narrow)

    @property
    def shares(self) -> bool:
        """Whether some encodings leave a part of the device to the steps."""
        return self._device.paces and self._device.settings.media.encoder_share < 1

    def try_out(self, item: MediaItem, shared: bool = False) -> None:
        """Encode an item into the first lines, and wait: for the start-up, whose steps need none of them. shared: on a part of the device,
        if it may."""
        if shared:
            self._device.pace_side(self._device.settings.media.encoder_share)
        event = self.start([item], [np.arange(item.num_embeddings, dtype=np.int32)])
        event.wait()
        if shared:
            self._device.pace_side(1.0)

    @torch.inference_mode()
    def _run(self, items: Sequence[MediaItem], lines: Int32Array) -> None:
        device, width = self._device, self.arena.shape[1]
        inputs = [
            EncoderInput(item.kind, item.num_embeddings, {name: device.upload(t) for name, t in item.tensors.items()}, item.info)
            for item in items
        ]
        target = device.upload(torch.from_numpy(lines).long())
        out = torch.empty(lines.size, width, dtype=self.arena.dtype, device=self.arena.device)
        pieces = out.split([each.num_embeddings for each in inputs])
        for each, piece in zip(inputs, pieces, strict=True):
            if each.kind == EMBEDS:
                piece[:, : self._hidden_size].copy_(each.tensors["embeddings"])
                piece[:, self._hidden_size :].zero_()
        for start, stop in spans([each.kind != EMBEDS for each in inputs]):
            first = sum(each.num_embeddings for each in inputs[:start])
            count = sum(each.num_embeddings for each in inputs[start:stop])
            self._state.encode(inputs[start:stop], out[first : first + count])
        self.arena.index_copy_(0, target, out)


def spans(chosen: Sequence[bool]) -> list[tuple[int, int]]:
    """(start, stop) of each unbroken row of True."""
    edges = np.flatnonzero(np.diff(np.array([False, *chosen, False]).astype(np.int8))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
