"""Plugin: Qwen2.5-VL and Qwen3-VL, models that read text, images and videos."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.model_state import ModelState

MODELRUNNER_API = ">=1,<2"

ARCHITECTURES = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")


@hookimpl
def model_state(card: ModelCard) -> Offer[type[ModelState]] | Decline:
    from modelrunner.model_states.common.card import architecture_of
    from modelrunner.model_states.qwen_vl.config import qwen_vl_config

    architecture = architecture_of(card)
    if architecture not in ARCHITECTURES:
        return Decline(f"architecture {architecture or 'not named'} is not a Qwen-VL model", accepts=ARCHITECTURES)
    try:
        qwen_vl_config(card)
    except ValueError as error:
        return Decline(str(error))
    return Offer("qwen_vl", load, "exact", f"{architecture} reads text, images and videos")


def load() -> type[ModelState]:
    from modelrunner.model_states.qwen_vl.state import QwenVLState

    return QwenVLState
