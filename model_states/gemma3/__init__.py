"""Plugin: Gemma 3 text models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.model_state import ModelState

MODELRUNNER_API = ">=1,<2"

ARCHITECTURES = ("Gemma3ForCausalLM",)


@hookimpl
def model_state(card: ModelCard) -> Offer[type[ModelState]] | Decline:
    from modelrunner.model_states.common.card import architecture_of
    from modelrunner.model_states.gemma3.config import gemma3_config

    architecture = architecture_of(card)
    if architecture not in ARCHITECTURES:
        return Decline(f"architecture {architecture or 'not named'} is not a Gemma 3 text model", accepts=ARCHITECTURES)
    try:
        gemma3_config(card)
    except ValueError as error:
        return Decline(str(error))
    return Offer("gemma3", load, "exact", f"{architecture} is a Gemma 3 text model")


def load() -> type[ModelState]:
    from modelrunner.model_states.gemma3.state import Gemma3State

    return Gemma3State
