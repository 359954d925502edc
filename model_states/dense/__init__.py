"""Plugin: dense decoders with RMS norm, rotary positions and gated MLPs (Llama, SmolLM2, Mistral, Phi-3, Qwen2, MiMo, Qwen3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.model_state import ModelState

MODELRUNNER_API = ">=1,<2"

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MiMoForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


@hookimpl
def model_state(card: ModelCard) -> Offer[type[ModelState]] | Decline:
    from modelrunner.model_states.common.card import architecture_of
    from modelrunner.model_states.dense.config import dense_config

    architecture = architecture_of(card)
    if architecture not in ARCHITECTURES:
        return Decline(f"architecture {architecture or 'not named'} is not of the dense family", accepts=ARCHITECTURES)
    try:
        dense_config(card)
    except ValueError as error:
        return Decline(str(error))
    return Offer("dense", load, "exact", f"{architecture} is a dense decoder")


def load() -> type[ModelState]:
    from modelrunner.model_states.dense.state import DenseState

    return DenseState
