"""A plugin that works: a model state, a command, an operation. When imported it appends its process id to the file in ACME_GOOD_LOG."""

import os

from modelrunner.cli import Command
from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Decline, Offer

MODELRUNNER_API = ">=1,<2"

if log := os.environ.get("ACME_GOOD_LOG"):
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")

ARCHITECTURES = ("AcmeGoodForCausalLM",)


def load_state():
    from modelrunner.model_state import ModelState

    class AcmeState(ModelState):
        def declare(self, card, settings): ...
        def weight_map(self, card): ...
        def build(self, ctx): ...
        def embed(self, batch, out): ...
        def forward(self, hidden, positions, attention, caches, tap): ...
        def logits(self, hidden): ...

    return AcmeState


@hookimpl
def model_state(card):
    if set(card.architectures) & set(ARCHITECTURES):
        return Offer("acme", load_state, reason="made for it")
    return Decline("only Acme's models", accepts=ARCHITECTURES)


@hookimpl
def cli_commands():
    return [Command("acme-hello", "greet", lambda parser: None, lambda args, manager: print("hello from acme") or 0)]


@hookimpl
def kernels(register):
    register.op("acme_double", lambda x: x + x, area="acme")
