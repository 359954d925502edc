"""Modules for multi-token prediction, trained and published with their target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.checkpoint import SafetensorsReader
from modelrunner.errors import CheckpointError
from modelrunner.hookspecs import hookimpl
from modelrunner.model_states.common.card import called
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.speculation import Drafter, TargetModel

MODELRUNNER_API = ">=1.6,<2"


SOURCE = "model.mtp_layers.0"  # the module's name in the checkpoint


@hookimpl
def drafter(card: ModelCard | None, target: TargetModel) -> Offer[type[Drafter]] | Decline:
    source = card or target.card
    names = tensor_names(source)
    if names and not any(name.startswith(f"{SOURCE}.") for name in names):
        return Decline(f"{called(source)} has no module for multi-token prediction: none of its {len(names)} tensors is called {SOURCE}.*")
    return Offer("mtp", load, "exact", f"reads the module for multi-token prediction of {called(source)}")


def tensor_names(card: ModelCard) -> list[str]:
    """Names of the checkpoint's tensors as far as its index, a file's head or the card tells them; none where reading them is more work,
    or where they cannot be read: loading the weights says why."""
    if card.format != "safetensors":
        return list(card.metadata.get("gguf.tensor_names", ()))
    reader = SafetensorsReader(card.path, card.name)
    try:
        listed = list(reader.files().values())
        return list(reader.names()) if None in listed else [name for names in listed for name in names or ()]
    except CheckpointError:
        return []


def load() -> type[Drafter]:
    from modelrunner.model_states.mtp.state import MTPDrafter

    return MTPDrafter
