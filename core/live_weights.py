"""The weights of a running engine, which other ones can replace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from modelrunner.weights import load_tensors

if TYPE_CHECKING:
    from modelrunner.assemble import Assembly


class LiveWeights:
    """The model's, those of a drafter that lie with them, and the scales of the cache. num_updates: of `replace` calls that succeeded."""

    def __init__(self, assembly: Assembly) -> None:
        self.num_updates = 0
        self._assembly = assembly
        self._broken = ""  # why the weights cannot be used

    @property
    def problem(self) -> str:
        """Why no step can use them: they were replaced in part, and not as a whole since. Empty when nothing is wrong."""
        if not self._broken:
            return ""
        return f"the weights are a mixture, since the last update_weights failed ({self._broken}); call it again with all tensors"

    def replace(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Store new ones, in place, with nothing in flight: see `Engine.update_weights`."""
        state, device, scales = self._assembly.state, self._assembly.device, self._assembly.scales
        weight_map = state.weight_map(self._assembly.card)
        device.synchronize()
        try:
            drafting = self._assembly.runner.parts.drafting
            weights = scales.passing(tensors if drafting is None else drafting.passing(tensors), weight_map)
            load_tensors(state.module, weight_map, weights, source="the set of new weights", writing=self._note_write)
            scales.store()
        except BaseException as error:
            if self._broken:
                self._broken = f"{type(error).__name__}: {error}"
            raise
        finally:
            device.synchronize()
        self._broken = ""
        self.num_updates += 1

    def _note_write(self) -> None:
        """From the first write of an update to its end the weights are a mixture."""
        self._broken = self._broken or "it was interrupted"
