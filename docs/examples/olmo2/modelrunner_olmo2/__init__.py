"""Plugin: OLMo 2 (Team OLMo 2024, arXiv:2501.00656)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.model_state import ModelState

MODELRUNNER_API = ">=1,<2"


@hookimpl
def model_state(card: ModelCard) -> Offer[type[ModelState]] | Decline:
    if "Olmo2ForCausalLM" not in card.architectures:
        return Decline("only OLMo 2", accepts=("Olmo2ForCausalLM",))
    if card.config.get("hidden_act", "silu") != "silu":
        return Decline(f"hidden_act is {card.config['hidden_act']!r}; silu is supported")
    return Offer("olmo2", load, "exact", "made for it")


def load() -> type[ModelState]:
    from modelrunner_olmo2.state import Olmo2State  # torch is imported here, so that listing plugins stays quick

    return Olmo2State
