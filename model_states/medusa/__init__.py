"""Medusa heads: each predicts one of the next tokens, all in one pass."""

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
    if card is None:
        return Decline("Medusa heads need weights, and speculation.model names none")
    if "medusa_num_layers" not in card.config:
        return Decline(f"{card.name} has no medusa_num_layers in its configuration, which all Medusa heads have")
    return Offer("medusa", load, "exact", f"{card.name} holds Medusa heads")


def load() -> type[Drafter]:
    from modelrunner.model_states.medusa.state import MedusaDrafter

    return MedusaDrafter
