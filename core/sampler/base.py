"""A sampler stage: one sampling feature, with the request-table columns it owns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelrunner.batch import Feature
from modelrunner.request_table import Column

if TYPE_CHECKING:
    import torch

    from modelrunner.batch import Batch
    from modelrunner.request import Request, SamplingParams
    from modelrunner.settings import RunnerSettings


class Stage:
    """One sampling feature. Subclasses answer only what concerns them; a stage that is not wanted by any row of a step costs nothing.

    inputs: arguments of the `sample` operation that this stage supplies, by name: the column of the same name, gathered for the step's
    rows.
    feature: the bit (or bits) by which rows ask for the stage; GREEDY (no bit) for a stage that always acts. uncaptured: those of its bits
    that no captured step may have.
    A stage that edits logits overrides `edit`; it runs after the built-in edits (see `edits`) and before the draw, in the order of the
    sampler's stages. Of a step with drafts it is called once for each place in a row's run, with the column `known` counting the drafts
    before that place, which lie behind the row's tokens: so what it does must follow from the known tokens, or its bits be undrafted.
    """

    inputs: tuple[str, ...] = ()
    feature: Feature = Feature.GREEDY
    uncaptured: Feature = Feature.GREEDY
    undrafted: Feature = Feature.GREEDY

    @property
    def acts(self) -> bool:
        """Whether the stage has an `edit` to be called."""
        return type(self).edit is not Stage.edit

    def columns(self, settings: RunnerSettings, vocab_size: int) -> tuple[Column, ...]:
        """H, at start-up. The columns this stage owns."""
        return ()

    def check(self, request: Request, settings: RunnerSettings) -> None:
        """H, at submission. Raises RequestError for what the parameters alone do not show, e.g. a list longer than its column."""
        return None

    def row_values(self, request: Request) -> Mapping[str, Any]:
        """H, at submission. Values of the stage's columns; an unnamed one gets its default. A seated column takes its elements."""
        return {}

    def features(self, params: SamplingParams) -> Feature:
        """H, at submission. What a request with these parameters asks of a step's tail."""
        return Feature.GREEDY

    def edit(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """D, may be captured; called only if a row of the step asks for `feature`. logits: [n, V] float32, a copy that may be changed.

        batch: of a step with prompts it has the rows, and no tokens (num_tokens is 0): what belongs to rows is in its columns.
        Returns `logits`, or new ones. Rows that did not ask must come out as they went in.
        """
        return logits
