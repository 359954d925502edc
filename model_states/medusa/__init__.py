"""Medusa heads: each predicts one of the next tokens, all in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.speculation import Drafter

MODELRUNNER_API = ">=1.6,<2"


@hookimpl
def drafter(card: ModelCard | None) -> Offer[type[Drafter]] | Decline:
    if card is None:
        return Decline("Medusa heads have weights: name their folder or hub id in speculation.model")
    return Offer("medusa", load, "exact", f"reads the weights of {card.name}")


def load() -> type[Drafter]:
    from modelrunner.model_states.medusa.state import MedusaDrafter

    return MedusaDrafter
