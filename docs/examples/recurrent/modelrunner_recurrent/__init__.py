"""Plugin: a made-up hybrid of gated linear attention (Yang et al. 2023, arXiv:2312.06635) and full attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.model_state import ModelState
    from modelrunner.ops import Register

MODELRUNNER_API = ">=1,<2"


@hookimpl
def model_state(card: ModelCard) -> Offer[type[ModelState]] | Decline:
    if "TinyRecurrentForCausalLM" not in card.architectures:
        return Decline("only the example's own model", accepts=("TinyRecurrentForCausalLM",))
    return Offer("recurrent_example", load, "exact", "made for it")


@hookimpl
def kernels(register: Register) -> None:
    from modelrunner.ops import CLOSE
    from modelrunner_recurrent.scan import gated_scan

    register.op("gated_scan", gated_scan, area="recurrent", tolerance=CLOSE)


def load() -> type[ModelState]:
    from modelrunner_recurrent.state import RecurrentExample  # torch is imported here, so that listing plugins stays quick

    return RecurrentExample
