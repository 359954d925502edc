"""Where the patches of an image or video lie: everything that follows from its grid alone, in numpy on the host.

A grid is (t, h, w): temporal patches, and patches down and across. Patches come frame by frame and within a frame token by token, where a
token is a block of merge x merge patches, both row by row. P patches, so P / merge**2 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Kind = TypeVar("Kind", bound=np.generic)
Grid = tuple[int, int, int]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def num_patches(grid: Grid) -> int:
    return grid[0] * grid[1] * grid[2]


def num_tokens(grid: Grid, merge: int) -> int:
    """Tokens, and rows of the encoder's output."""
    return num_patches(grid) // merge**2


def patch_coordinates(grid: Grid, merge: int) -> Ints:
    """Row and column of each patch in its frame: [P, 2]."""
    frames, height, width = grid
    places = np.indices((height, width), dtype=np.int64).reshape(2, height // merge, merge, width // merge, merge)
    frame = places.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
    return np.tile(frame, (frames, 1))


@dataclass(frozen=True)
class Windows:
    """The order in which attention windows lie one after another. order: [tokens] int64. lengths: [windows] int32 tokens of each."""

    order: Ints
    lengths: npt.NDArray[np.int32]


def windows(grid: Grid, merge: int, side: int) -> Windows:
    """Cut each frame into windows of side x side tokens, row by row; those at the right and lower edge may be smaller."""
    frames, height, width = grid[0], grid[1] // merge, grid[2] // merge
    index = np.arange(height * width, dtype=np.int64).reshape(height, width)
    cut = [index[y : y + side, x : x + side].ravel() for y in range(0, height, side) for x in range(0, width, side)]
    order = (np.arange(frames)[:, None] * height * width + np.concatenate(cut)).ravel()
    return Windows(order, np.tile(np.array([len(each) for each in cut], np.int32), frames))


def by_token(patches: npt.NDArray[Kind], order: Ints, merge: int) -> npt.NDArray[Kind]:
    """`patches` [P, ...] with its tokens in another order."""
    return patches.reshape(len(order), merge**2, *patches.shape[1:])[order].reshape(patches.shape)


def bilinear_taps(coordinates: Ints, grid: Grid, side: int) -> tuple[Ints, Floats]:
    """How a table of side x side learned positions is stretched over the frame, corner on corner: entries [P, 4] and weights [P, 4]."""
    entries, weights = [], []
    for axis in (0, 1):
        size = grid[1 + axis]
        place = coordinates[:, axis].astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
        first = np.floor(place)
        part = place - first
        low = first.astype(np.int64)
        entries.append(np.stack((low, np.minimum(low + 1, side - 1)), -1))
        weights.append(np.stack((1 - part, part), -1))
    taps = entries[0][:, :, None] * side + entries[1][:, None, :]
    return taps.reshape(-1, 4), (weights[0][:, :, None] * weights[1][:, None, :]).reshape(-1, 4).astype(np.float32)


def token_positions(grid: Grid, merge: int, interval: float) -> npt.NDArray[np.int32]:
    """Time, height and width of each token, from the first one's: [tokens, 3]. interval: steps in time between temporal patches.

    Times are rounded down, as the model's authors do it, in float32.
    """
    frames, height, width = grid[0], grid[1] // merge, grid[2] // merge
    places = np.indices((frames, height, width), dtype=np.int32).reshape(3, -1)
    times = np.floor(np.arange(frames, dtype=np.float32) * np.float32(interval)).astype(np.int32)
    places[0] = times[places[0]]
    return np.ascontiguousarray(places.T)
