"""What steps read of media, on the device: the arena, and where each token of a step finds its embedding and its position.

A step with media has its lines and positions copied into buffers of fixed addresses beside its plan. All other steps send and read nothing
of this; where tokens have several positions (M-RoPE), one small operation adds to their indices what their requests' media made of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from modelrunner.batch import Batch, Plan
from modelrunner.media import MediaBatch
from modelrunner.request_table import Column

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from modelrunner.device import Device
    from modelrunner.ops import Ops
    from modelrunner.runner_parts import Parts

DELTA = Column("media.delta", torch.int32)  # what a row's tokens behind its media have as position beside their index


def media_steps(parts: Parts, entries: int, tokens: int) -> MediaSteps | None:
    """Those of a runner; None where there is no arena. entries, tokens: see `MediaSteps`."""
    if parts.media_arena is None:
        return None
    position_rows = 1 if parts.needs.media is None else parts.needs.media.position_rows
    shifted = parts.drafting is not None and parts.drafting.needs.shifted
    return MediaSteps(parts.device, parts.ops, parts.table.columns, parts.media_arena, position_rows, entries, tokens, shifted)


class MediaSteps:
    """The buffers of a runner. `pack` and `release` run on the host, the rest on the device.

    arena: of an `Encoder`. position_rows: see `MediaNeeds`. entries: of the runner's rings. tokens: of the largest padded step. shifted:
    plans also say where the token after each finds its embedding.
    """

    def __init__(
        self,
        device: Device,
        ops: Ops,
        columns: Mapping[str, torch.Tensor],
        arena: torch.Tensor,
        position_rows: int,
        entries: int,
        tokens: int,
        shifted: bool = False,
    ) -> None:
        self._device, self._ops = device, ops
        self.arena, self._shifted = arena, shifted
        rows = position_rows if position_rows > 1 else 0
        self._lines = 2 if shifted else 1  # of the arena, before the rows of positions
        self._given = torch.full((self._lines + rows, tokens), -1, dtype=torch.int32, device=device.torch_device)
        self._positions = torch.zeros(max(rows, 1), tokens, dtype=torch.int64, device=device.torch_device)
        self._nothing = torch.full((1, tokens), -1, dtype=torch.int32, device=device.torch_device)
        self._delta = columns.get(DELTA.name)
        self._pinned = [device.pinned(4 * self._given.numel()) for _ in range(entries)]

    def pack(self, plan: Plan, num_tokens: int, entry: int) -> Callable[[], None]:
        """Put what the plan has of media, padded to `num_tokens`, into a pinned buffer. Returns the work that brings it to the device."""
        media, rows, own = plan.media, len(self._given), slice(plan.num_tokens)
        assert media is not None
        words = self._pinned[entry].array.view(np.int32)[: rows * num_tokens].reshape(rows, num_tokens)
        words[:, plan.num_tokens :] = -1
        words[0, own] = media.lines
        if media.following is not None:
            words[1, own] = media.following
        if media.positions is not None:
            words[self._lines :, own] = media.positions
        return partial(self._upload, entry, num_tokens)

    @torch.inference_mode()
    def _upload(self, entry: int, num_tokens: int) -> None:
        size = 4 * len(self._given) * num_tokens
        source = self._pinned[entry].tensor[:size].view(torch.int32).view(-1, num_tokens)
        for target, line in zip(self._given, source, strict=True):
            target[:num_tokens].copy_(line, non_blocking=True)

    def release(self, entry: int) -> None:
        """The entry's step was collected."""
        self._device.release(self._pinned[entry])

    def view(self, num_tokens: int) -> MediaBatch:
        """What a step of the kind with media reads."""
        lines = self._given[:, :num_tokens]
        return MediaBatch(self.arena, lines[0], lines[1] if self._shifted else None)

    def place(self, batch: Batch, hidden: torch.Tensor) -> None:
        """D. Put the embeddings of media over those of the table: hidden [T, H]."""
        if batch.media is not None:
            self._ops.place_media(hidden, batch.media.arena, batch.media.slots)

    def positions(self, batch: Batch) -> torch.Tensor:
        """D. The step's positions, as `ModelState.positions` is told."""
        if self._delta is None:
            return batch.positions
        count, indices = batch.num_tokens, (batch.positions, batch.token_row, batch.rows, self._delta)
        if batch.media is None:
            out = self._positions[:1, :count]
            self._ops.media_positions(self._nothing[:, :count], *indices, out)
            return out[0]
        out = self._positions[:, :count]
        self._ops.media_positions(self._given[self._lines :, :count], *indices, out)
        return out
