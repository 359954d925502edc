"""EAGLE heads: a decoder layer that predicts the target's next feature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.speculation import Drafter

MODELRUNNER_API = ">=1,<2"


@hookimpl
def drafter(card: ModelCard | None) -> Offer[type[Drafter]] | Decline:
    from modelrunner.model_states.common.card import architecture_of
    from modelrunner.model_states.common.drafter_cards import is_eagle3

    if card is None:
        return Decline("an EAGLE head needs weights, and speculation.model names none")
    architecture = architecture_of(card)
    if "eagle" in architecture.lower() and not is_eagle3(card.config, architecture):
        return Offer("eagle", load, "exact", f"{architecture} is an EAGLE head")
    return Offer("eagle", load, "fallback", f"{architecture or 'a checkpoint without architecture'} may be an EAGLE head; published ones do not say")


def load() -> type[Drafter]:
    from modelrunner.model_states.eagle.state import EagleDrafter

    return EagleDrafter
