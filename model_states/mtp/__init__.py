"""Modules for multi-token prediction, trained and published with their target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.settings import RunnerSettings
    from modelrunner.speculation import Drafter, TargetModel

MODELRUNNER_API = ">=1,<2"


@hookimpl
def drafter(card: ModelCard | None, target: TargetModel, settings: RunnerSettings) -> Offer[type[Drafter]] | Decline:
    source = card or target.card
    if not source.config.get("num_nextn_predict_layers") and settings.speculation.drafter != "mtp":
        return Decline(f"{source.name} has no num_nextn_predict_layers in its configuration; name mtp in speculation.drafter if it has such a module")
    return Offer("mtp", load, "family", f"{source.name} brings a module for multi-token prediction")


def load() -> type[Drafter]:
    from modelrunner.model_states.mtp.state import MTPDrafter

    return MTPDrafter
