"""The sampler: stages put together, and the choice between the greedy and the drawing tail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from modelrunner.batch import Feature
from modelrunner.request_table import Column
from modelrunner.sampler.base import Stage
from modelrunner.sampler.draw import Draw
from modelrunner.sampler.min_p import MinP
from modelrunner.sampler.stop_ids import StopIds
from modelrunner.sampler.temperature import Temperature
from modelrunner.sampler.top_k import TopK
from modelrunner.sampler.top_p import TopP

if TYPE_CHECKING:
    from modelrunner.batch import Batch
    from modelrunner.ops import Ops
    from modelrunner.request import Request, SamplingParams
    from modelrunner.settings import RunnerSettings


def default_stages() -> tuple[Stage, ...]:
    """Every built-in stage, in the order in which they act. Stages that edit logits belong before Temperature."""
    return (Temperature(), MinP(), TopK(), TopP(), Draw(), StopIds())


class Sampler:
    """Composes stages. The host side asks every stage; the device side runs one `greedy` or one `sample` operation over the step's rows."""

    def __init__(self, ops: Ops, stages: Sequence[Stage]) -> None:
        """Raises ValueError if two stages supply the same argument of `sample`."""
        self.ops = ops
        self.stages = tuple(stages)
        self._inputs: dict[str, Feature] = {}
        for stage in self.stages:
            for name in stage.inputs:
                if name in self._inputs:
                    raise ValueError(f"two sampler stages supply {name!r}; each argument of the sample operation has one owner")
                self._inputs[name] = stage.feature

    def columns(self, settings: RunnerSettings) -> tuple[Column, ...]:
        """H. Request-table columns of all stages."""
        return tuple(column for stage in self.stages for column in stage.columns(settings))

    def check(self, request: Request, settings: RunnerSettings) -> None:
        """H, at submission. Raises RequestError for a request that a stage cannot hold."""
        for stage in self.stages:
            stage.check(request, settings)

    def row_values(self, request: Request) -> dict[str, Any]:
        """H, at submission. Column values of the request."""
        values: dict[str, Any] = {}
        for stage in self.stages:
            values.update(stage.row_values(request))
        return values

    def features(self, params: SamplingParams) -> Feature:
        """H, at submission. Union of what the stages need of a step's tail."""
        found = Feature.GREEDY
        for stage in self.stages:
            found |= stage.features(params)
        return found

    def sample(self, logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """D, may be captured. Choose a token for every row; `batch.features` says what the rows ask for.

        logits: [N, V] in the model's dtype, left as they are. A row's token depends on its own logits and columns only.
        Returns tokens [N, 1] int64, num_tokens [N] int32 (1 where the row samples and its logits allow it), ok [N] bool.
        """
        features = batch.features
        for stage in self.stages:
            if stage.feature == Feature.GREEDY or stage.feature & features:
                logits = stage.edit(logits, batch)
        if features & Feature.PLAIN:
            columns = {name: self._column(name, feature, batch) for name, feature in self._inputs.items()}
            tokens, counts, ok = self.ops.sample_rows(logits, batch.rows, batch.samples, batch.computed, batch.query_len, **columns)
        else:
            tokens, counts, ok = self.ops.greedy_rows(logits, batch.samples)
        return tokens.unsqueeze(1), counts, ok

    def _column(self, name: str, feature: Feature, batch: Batch) -> torch.Tensor | None:
        """The column `name`; None if its stage is not asked for."""
        return batch.columns[name] if feature == Feature.GREEDY or feature & batch.features else None
