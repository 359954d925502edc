"""A plugin that registers one operation and then fails."""

from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

MODELRUNNER_API = ">=1,<2"


@hookimpl
def linear_scheme(card):
    return Offer("half", lambda: object) if card.model_type == "half" else Decline("only the model type `half`")


@hookimpl
def kernels(register, device):
    register.op("half_one", lambda x: x, area="half")
    raise RuntimeError("no second operation")
