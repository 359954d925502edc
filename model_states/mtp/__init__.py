"""Modules for multi-token prediction, trained and published with their target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Offer

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.speculation import Drafter, TargetModel

MODELRUNNER_API = ">=1.6,<2"


@hookimpl
def drafter(card: ModelCard | None, target: TargetModel) -> Offer[type[Drafter]]:
    source = card or target.card
    return Offer("mtp", load, "exact", f"reads the module for multi-token prediction of {source.name}")


def load() -> type[Drafter]:
    from modelrunner.model_states.mtp.state import MTPDrafter

    return MTPDrafter
