"""Stages that change logits before the draw. Each supplies one argument of the operation `edit_logits`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from modelrunner.sampler.base import Stage


class EditStage(Stage):
    """A stage of `edit_logits`. argument: the operation's argument. tensors: the columns that make it up, in order."""

    argument: str
    tensors: tuple[str, ...]

    def given(self, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """D. The argument. columns: the request table's."""
        return tuple(columns[name] for name in self.tensors)


def seats_for(wanted: int | None, max_rows: int) -> int:
    """Seats of a column: as set, else one for every row."""
    return max_rows if wanted is None else wanted
