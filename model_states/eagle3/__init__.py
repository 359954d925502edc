"""EAGLE-3 heads: a decoder layer on hidden states of three of the target's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.settings import RunnerSettings
    from modelrunner.speculation import Drafter

MODELRUNNER_API = ">=1,<2"


@hookimpl
def drafter(card: ModelCard | None, settings: RunnerSettings) -> Offer[type[Drafter]] | Decline:
    from modelrunner.model_states.common.card import architecture_of
    from modelrunner.model_states.common.drafter_cards import is_eagle3

    if card is None:
        return Decline("an EAGLE-3 head needs weights, and speculation.model names none")
    architecture = architecture_of(card)
    if not is_eagle3(card.config, architecture) and settings.speculation.drafter != "eagle3":
        return Decline(f"nothing in the configuration of {card.name} says EAGLE-3; name it in speculation.drafter if it is")
    return Offer("eagle3", load, "exact", f"{architecture or card.name} is an EAGLE-3 head")


def load() -> type[Drafter]:
    from modelrunner.model_states.eagle3.state import Eagle3Drafter

    return Eagle3Drafter
