"""Plugin: the last resort. Any causal decoder of transformers that takes a custom attention function, run on the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.model_state import ModelState
    from modelrunner.settings import RunnerSettings

MODELRUNNER_API = ">=1,<2"


@hookimpl
def model_state(card: ModelCard, settings: RunnerSettings) -> Offer[type[ModelState]] | Decline:
    from modelrunner.model_states.transformers.config import reason_against

    reason = reason_against(card, settings)
    if reason:
        return Decline(reason)
    return Offer("transformers", load, "fallback", f"transformers' own {card.architectures[0]}, its attention on the paged cache")


def load() -> type[ModelState]:
    from modelrunner.model_states.transformers.state import TransformersState

    return TransformersState
