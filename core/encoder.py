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
    from modelrunner.encoder_graphs import EncoderGraphs
    from modelrunner.media import Int32Array
    from modelrunner.model_state import ModelState


FEW = 4  # items of an encoding up to which each may have a graph of its own


class Encoder:
    """Owns the arena: [lines, width] of `dtype`, at a fixed address. Lines that nobody has written hold NaN on a testing device."""

    def __init__(
        self,
        device: Device,
        state: ModelState,
        lines: int,
        width: int,
        hidden_size: int,
        dtype: torch.dtype,
        narrow: int = 0,
        graphs: EncoderGraphs | None = None,
    ) -> None:
        """width: elements of a line, of which the first `hidden_size` are the embedding. narrow: most embeddings of an encoding that may
        run on a part of the device. graphs: of small items, where they are captured."""
        self._device, self._state, self._hidden_size = device, state, hidden_size
        self.narrow, self.graphs = narrow, graphs
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

    @property
    def graph_tokens(self) -> int:
        """Most embeddings of an item that is captured; 0 where none is."""
        return 0 if self.graphs is None else self.graphs.most_tokens

    def try_out(self, item: MediaItem, times: int = 1, shared: bool = False) -> None:
        """Encode an item into the first lines, and wait: for the start-up, whose steps need none of them. shared: on a part of the device,
        if it may."""
        if shared:
            self._device.pace_side(self._device.settings.media.encoder_share)
        for _ in range(times):
            self.start([item], [np.arange(item.num_embeddings, dtype=np.int32)]).wait()
        if shared:
            self._device.pace_side(1.0)

    @torch.inference_mode()
    def _run(self, items: Sequence[MediaItem], lines: Int32Array) -> None:
        device = self._device
        target = device.upload(torch.from_numpy(lines).long())
        out = torch.empty(lines.size, self.arena.shape[1], dtype=self.arena.dtype, device=self.arena.device)
        pieces = out.split([item.num_embeddings for item in items])
        eager = [not self._by_graph(item, piece, len(items)) for item, piece in zip(items, pieces, strict=True)]
        for start, stop in spans(eager):
            first = sum(item.num_embeddings for item in items[:start])
            count = sum(item.num_embeddings for item in items[start:stop])
            inputs = [
                EncoderInput(item.kind, item.num_embeddings, {name: device.upload(t) for name, t in item.tensors.items()}, item.info)
                for item in items[start:stop]
            ]
            self._state.encode(inputs, out[first : first + count])
        self.arena.index_copy_(0, target, out)

    def _by_graph(self, item: MediaItem, out: torch.Tensor, together: int) -> bool:
        """Whether an item's lines are there without the state's `encode`: embeddings as they were given, or what a graph made.

        together: items of the encoding; many small ones are faster in one eager pass.
        """
        if item.kind == EMBEDS:
            out[:, : self._hidden_size].copy_(self._device.upload(item.tensors["embeddings"]))
            out[:, self._hidden_size :].zero_()
            return True
        made = self.graphs.run(item) if self.graphs is not None and together <= FEW else None
        if made is None:
            return False
        out.copy_(made)
        return True


def spans(chosen: Sequence[bool]) -> list[tuple[int, int]]:
    """(start, stop) of each unbroken row of True."""
    edges = np.flatnonzero(np.diff(np.array([False, *chosen, False]).astype(np.int8))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))
