"""How linear layers store their weights: `plain` (the model's float type) and `int8` (8-bit weights with a scale per output)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard
    from modelrunner.linear import LinearScheme

MODELRUNNER_API = ">=1,<2"


@hookimpl
def linear_scheme(card: ModelCard) -> list[Offer[type[LinearScheme]] | Decline]:
    if card.quantization is not None:
        method = card.quantization.get("quant_method", "an unnamed method")
        return [Decline(f"the checkpoint is quantised ({method}); built in are only schemes that start from float weights")]
    return [
        Offer("plain", load_plain, "family", "weights in the model's own float type"),
        Offer("int8", load_int8, "fallback", "8-bit weights, a scale per output; chosen by linear.scheme=int8"),
    ]


def load_plain() -> type[LinearScheme]:
    from modelrunner.linear import PlainScheme

    return PlainScheme


def load_int8() -> type[LinearScheme]:
    from modelrunner.linear import Int8Scheme

    return Int8Scheme
