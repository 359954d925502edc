"""Graphs of encodings: small images keep the host longer than the device, so what comes again in the same size is captured.

An encoding of one item is captured when its shape comes the second time, and replayed from then on: the item's tensors are copied to where
the graph reads them. What is larger than `most_tokens` embeddings keeps the device busy anyway. Everything here runs inside side work.
"""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from modelrunner.errors import PluginWarning
from modelrunner.media import EncoderInput, MediaItem

if TYPE_CHECKING:
    from modelrunner.device import Device
    from modelrunner.model_state import ModelState

MOST_GRAPHS = 32  # that are kept in each place, the ones used last
MOST_SEEN = 1024  # shapes that are remembered without a graph


Key = tuple[Hashable, ...]
Value = TypeVar("Value")


@dataclass(frozen=True)
class EncoderGraph:
    """A captured encoding of one item. item: what it reads, at fixed addresses."""

    item: EncoderInput
    replay: Callable[[], None]


class EncoderGraphs:
    """The graphs of a state's encoder. num_captured: so far."""

    def __init__(self, device: Device, state: ModelState, width: int, dtype: torch.dtype, most_tokens: int) -> None:
        """width: elements of a line of the arena."""
        self._device, self._state = device, state
        self.most_tokens = most_tokens
        self._out = torch.empty(most_tokens, width, dtype=dtype, device=device.torch_device)
        self._graphs: dict[int, OrderedDict[Key, EncoderGraph]] = {}  # by the place on the device: what is captured in one stays there
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._broken = False
        self.num_captured = 0

    def run(self, item: MediaItem) -> torch.Tensor | None:
        """The item's lines, [num_embeddings, width], encoded by a graph: read them before anything else is encoded. None where there is no
        graph of its shape: encode it eagerly."""
        if self._broken or item.num_embeddings > self.most_tokens:
            return None
        place, shape = self._device.side_place(), shape_of(item)
        graphs = self._graphs.setdefault(place, OrderedDict())
        graph = graphs.get(shape)
        if graph is not None:
            for name, tensor in item.tensors.items():
                self._device.upload(tensor, graph.item.tensors[name])
        elif (place, shape) in self._seen:
            graph = self._capture(item)
        else:
            remember(self._seen, (place, shape), None, MOST_SEEN)
        if graph is None:
            return None
        remember(graphs, shape, graph, MOST_GRAPHS)
        graph.replay()
        return self._out[: item.num_embeddings]

    def _capture(self, item: MediaItem) -> EncoderGraph | None:
        tensors = {name: self._device.upload(tensor) for name, tensor in item.tensors.items()}
        inputs = EncoderInput(item.kind, item.num_embeddings, tensors, item.info)
        try:
            replay = self._device.capture_side(partial(self._state.encode, [inputs], self._out[: item.num_embeddings]))
        except Exception as error:
            self._broken = True
            warnings.warn(
                f"{type(self._state).__name__}.encode cannot be captured and runs eagerly from now on: {type(error).__name__}: {error}. "
                "Set media.graph_tokens=0, or leave MediaNeeds.capture off",
                PluginWarning,
                stacklevel=2,
            )
            return None
        self.num_captured += 1
        return EncoderGraph(inputs, replay)


def shape_of(item: MediaItem) -> Key:
    """What a graph depends on: all of the item but what its tensors hold."""
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in item.tensors.items())
    return item.kind, item.num_embeddings, shapes, json.dumps(item.info, sort_keys=True)


def remember(table: OrderedDict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Put a value in as the newest, and leave out the oldest."""
    table[key] = value
    table.move_to_end(key)
    while len(table) > most:
        table.popitem(last=False)
