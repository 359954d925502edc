"""Plugin: Idefics3 and SmolVLM, Llama decoders that read images cut into tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.model_state import ModelState

MODELRUNNER_API = ">=1,<2"

ARCHITECTURES = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")


@hookimpl
def model_state(card: ModelCard) -> Offer[type[ModelState]] | Decline:
    from modelrunner.model_states.common.card import architecture_of
    from modelrunner.model_states.idefics3.config import idefics3_config

    architecture = architecture_of(card)
    if architecture not in ARCHITECTURES:
        return Decline(f"architecture {architecture or 'not named'} is neither Idefics3 nor SmolVLM", accepts=ARCHITECTURES)
    try:
        idefics3_config(card)
    except ValueError as error:
        return Decline(str(error))
    return Offer("idefics3", load, "exact", f"{architecture} reads text and images")


def load() -> type[ModelState]:
    from modelrunner.model_states.idefics3.state import Idefics3State

    return Idefics3State
