"""What an engine asks its parts about a request: model state, sampler, taps, guides, drafter."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelrunner.errors import PluginError, PluginWarning, RequestError
from modelrunner.media_steps import DELTA
from modelrunner.model_state import No, answer_of
from modelrunner.request import Request

if TYPE_CHECKING:
    from modelrunner.assemble import Assembly


class PartCalls:
    """Asks the parts of `assembly`: at a request's start (`accept`), then for the scheduler, which takes the other methods as callbacks."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    def accept(self, request: Request) -> None:
        """Let every part look at a new request, and note in it what they say. Raises RequestError when one of them cannot serve it."""
        parts = self._assembly
        parts.sampler.check(request, parts.settings)
        request.features = int(parts.sampler.features(request.params))
        if request.params.prompt_logprobs is not None:
            answer = answer_of(parts.state, "prompt_logprobs")
            if isinstance(answer, No):
                raise RequestError(f"prompt_logprobs: {type(parts.state).__name__} gives none: {answer.reason}")
        parts.taps.admit(request)
        parts.guides.open(request)
        self._let_draft(request)

    def _let_draft(self, request: Request) -> None:
        """Decide how many drafts steps may have for the request, and ask the drafter for its column values."""
        parts = self._assembly
        drafting = parts.runner.parts.drafting
        if drafting is None:
            return
        wanted = request.params.num_draft_tokens
        alone = request.features & int(parts.sampler.undrafted | parts.taps.all_features)
        request.num_draft = 0 if alone else drafting.most if wanted is None else min(wanted, drafting.most)
        try:
            request.draft_values = dict(drafting.drafter.row_values(request))
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(f"drafter {parts.resolved.components['drafter']}: {error}") from error

    def row_values(self, request: Request) -> Mapping[str, Any]:
        """Values of its row's plain and seated columns, by column name."""
        values = {**self._assembly.sampler.row_values(request), **request.tap_values, **request.draft_values}
        if request.media is not None and DELTA.name in self._assembly.table.regions:
            values[DELTA.name] = request.media.delta
        return values

    def admit(self, row: int, request: Request, resumed: bool) -> Mapping[str, Any]:
        """Further ones, when it gets `row`. resumed: it had a row before."""
        state, method = self._assembly.state, "resume_row" if resumed else "add_row"
        try:
            values: object = getattr(state, method)(row, request)
        except Exception as error:
            raise PluginError(f"{type(state).__name__}.{method} raised {type(error).__name__}: {error}") from error
        if not isinstance(values, Mapping):
            raise PluginError(f"{type(state).__name__}.{method} returned {values!r}; a mapping of column values is needed, {{}} for none")
        return {**values, **self._assembly.guides.row_values(request)}

    def remove(self, row: int, request: Request) -> None:
        """It has left the row."""
        state = self._assembly.state
        try:
            state.remove_row(row, request)
        except Exception as error:  # the row is left all the same: in the middle of that the books must not stop
            warnings.warn(
                f"{type(state).__name__}.remove_row raised for request {request.id!r}, which left row {row}: "
                f"{type(error).__name__}: {error}. What this model state keeps of the row may be stale",
                PluginWarning,
                stacklevel=2,
            )
